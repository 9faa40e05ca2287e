// The ExecuTorch engine: programs exported with our operator, evaluated by libedge_qkv_executorch.
#pragma once

#include <memory>
#include <string>

#include "engines/engines.h"

namespace edge_qkv::et {

// Loads the program that describe_pte has described. Throws Error.
std::unique_ptr<EngineModel> load_pte(const ModelInfo& info, const EngineOptions& options);

// Writes its weights as XNNPACK keeps them into
// options.packed_weights, see engines/packed.h. Throws Error.
void pack_pte(const ModelInfo& info, const EngineOptions& options);

// Whether they are there.
bool is_packed(const ModelInfo& info, const EngineOptions& options);

}  // namespace edge_qkv::et
