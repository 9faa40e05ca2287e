// What opening a model shares with planning it.
#pragma once

#include "core/plan.h"
#include "edge_qkv.h"
#include "engines/engines.h"

namespace edge_qkv {

EngineOptions engine_options(const eqkv_model_options& options);

// The plan of the described model. Throws Error with EQKV_OVER_BUDGET where options.memory does not hold
// it; nothing large has been read by then.
Plan plan_to_open(const ModelInfo& model, const eqkv_model_options& options);

}  // namespace edge_qkv
