// An ONNX file, checked to be a model of ours: everything about it comes from outside.
#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "handles.h"
#include "library.h"

namespace edge_qkv::ort {

// The graph's contract, format version 2:
//   inputs  input_ids int64 [1, T]; past int64 []; logit_rows int64 [R]; caches [1, G, C, D]
//   outputs logits float [1, R, V]; each cache again, "_out" before the dot
// with caches kv.{i} (unified) or key.{i}, value.{i}, i in [0, layers); after them, where the cache is
// int8, their scales [1, G, C] fp16: kv_scale.{i} or key_scale.{i}, value_scale.{i}. Its numbers are in
// the metadata, each key after "edge_qkv.": format, vocab_size, layers, kv_heads, head_dim, caches,
// max_positions, cache_type, window, sinks, positions, rotary_dim, rotary_base, fingerprint; and for the
// plan: heads, width, mlp_width, mlp_matrices, weight_bits, block_size, matrix_bytes, table_bytes.
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
ModelDescription describe_onnx(const std::string& path);

// Checks the inputs and outputs of a loaded graph against `info`. Throws Error with EQKV_BAD_PACKAGE;
// `path` is for the message.
void check_graph(const Library& library, OrtSession* session, const ModelInfo& info,
                 const std::string& path);

}  // namespace edge_qkv::ort
