// An ExecuTorch program, checked to be a model of ours: everything about it comes from outside.
#pragma once

#include <string>

#include "core/engine.h"

namespace edge_qkv::et {

// Reads and checks the metadata of the file at `path`. Its keys are those of an ONNX model
// (engines/onnxruntime/model_file.h) and, each after "edge_qkv." too: cache_rows, prefill_chunk,
// operator (the version of the attention operator that forward calls) and executorch (the version that
// wrote the file, for people). Throws Error with EQKV_BAD_PACKAGE.
ModelDescription describe_pte(const std::string& path);

}  // namespace edge_qkv::et
