// The ONNX Runtime engine: models exported as ONNX, with the attention operator of this library.
#pragma once

#include <memory>
#include <string>

#include "engines/engines.h"

namespace edge_qkv::ort {

// Opens the ONNX file at `path`; weights in files beside it are found by ONNX Runtime. Throws Error.
std::unique_ptr<EngineModel> open_onnx(const std::string& path, const EngineOptions& options);

// Writes the weights of the ONNX file at `path` as ONNX Runtime keeps them into options.packed_weights,
// see packed.h. Throws Error.
void pack_onnx(const std::string& path, const EngineOptions& options);

// Whether they are there.
bool is_packed(const std::string& path, const EngineOptions& options);

}  // namespace edge_qkv::ort
