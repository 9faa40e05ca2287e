// The ONNX Runtime engine: models exported as ONNX, with the attention operator of this library.
#pragma once

#include <memory>
#include <string>

#include "engines/engines.h"

namespace edge_qkv::ort {

// Loads the model that describe_onnx has described; weights in files beside it are found by ONNX
// Runtime. Throws Error.
std::unique_ptr<EngineModel> load_onnx(const ModelInfo& info, const EngineOptions& options);

// Writes its weights as ONNX Runtime keeps them into options.packed_weights, see packed.h. Throws Error.
void pack_onnx(const ModelInfo& info, const EngineOptions& options);

// Whether they are there.
bool is_packed(const ModelInfo& info, const EngineOptions& options);

}  // namespace edge_qkv::ort
