// The engines there are: which of them a package belongs to, and what each does with it.
#pragma once

#include <memory>
#include <string>

#include "core/engine.h"
#include "core/plan.h"

namespace edge_qkv {

struct EngineOptions {
  // Path of the engine's shared library; empty: where the engine looks, see library.h.
  std::string library;
  int threads = 0;  // 0: one for each core
  // Directory of weights in the form that the engine computes with on this processor, which `pack_model`
  // fills; empty: none. What is missing or damaged there is as if it had not been given.
  std::string packed_weights;
};

// The number of threads that `threads` stands for. Throws Error where it is out of range.
int resolved_threads(int threads);

// A package directory belongs to the engine whose model file it holds, a model file to the engine whose
// ending it has.

// Reads the description of the package directory or model
// file at `path`; no engine is opened. Throws Error.
ModelInfo describe_model(const std::string& path);

// How the engine of this name, as in ModelInfo, counts its memory. Throws Error for an unknown one.
const PlanEngine& plan_engine(const std::string& name);

// Loads a described model with the engine it was exported for. Throws Error.
std::unique_ptr<EngineModel> load_model(const ModelInfo& info, const EngineOptions& options);

// Writes its packed weights into options.packed_weights, unless they are there. What is interrupted
// leaves nothing that `load_model` would take. Throws Error.
void pack_model(const ModelInfo& info, const EngineOptions& options);

// Whether `load_model` would take packed weights from options.packed_weights.
bool model_is_packed(const ModelInfo& info, const EngineOptions& options);

}  // namespace edge_qkv
