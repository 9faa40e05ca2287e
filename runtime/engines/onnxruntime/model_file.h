// An ONNX file, checked to be a model of ours: everything about it comes from outside.
#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "handles.h"
#include "library.h"

namespace edge_qkv::ort {

// The graph's contract:
//   inputs  input_ids int64 [1, T]; past int64 []; logit_rows int64 [R]; caches [1, G, C, dim]
//   outputs logits float [1, R, V]; each cache again, "_out" before the dot
// with the caches of the description, in their order: kv.{layer}, or key.{layer} and value.{layer};
// then, where the cache is int8, their scales [1, G, C] fp16: kv_scale.{layer} and so on.
struct GraphNames {
  std::vector<std::string> inputs;   // input_ids, past, logit_rows, caches
  std::vector<std::string> outputs;  // logits, caches
};

// ONNX's element type of a cache's values.
constexpr int element_type(CacheType type) {
  return type == CacheType::kFloat32 ? kFloat : type == CacheType::kFloat16 ? kFloat16 : kInt8;
}

// Number of inputs before the caches, and of outputs.
constexpr size_t kPlainInputs = 3, kPlainOutputs = 1;

GraphNames graph_names(const ModelInfo& info);

// Reads and checks the metadata of the file at `path`. Throws Error with EQKV_BAD_PACKAGE.
ModelInfo describe_onnx(const std::string& path);

// Checks the inputs and outputs of a loaded graph against the description. Throws Error with
// EQKV_BAD_PACKAGE.
void check_graph(const Library& library, OrtSession* session, const ModelInfo& info);

}  // namespace edge_qkv::ort
