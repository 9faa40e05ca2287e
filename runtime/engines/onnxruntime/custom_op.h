// The attention operator as an ONNX Runtime custom op: domain "edge_qkv", op "UnifiedKVAttention".
//
//   inputs: 0 query, 1 kv? (or key), 2 cache, 3 past, 4 cos?, 5 sin?, 6 value?, 7 value_cache?,
//           8 cache_scale?, 9 value_cache_scale?, 10 key_weight?
//   outputs: 0 attention, 1 cache_out?, 2 value_cache_out?, 3 cache_scale_out?, 4 value_cache_scale_out?
//   attributes: num_heads, kv_heads, scale, rotary ("none", "conjugate", "on_read"), rotary_dim,
//               rotary_offset, value_dim, window, sinks
//
// Shapes and meaning are those of attention/attention.h; there are scales where the cache is int8. A
// cache, and likewise its scales, is updated in place where its input and output are one buffer;
// otherwise its valid rows are copied first and rows >= past + T are left undefined. Without kv the
// caches are the outputs of an earlier layer's node, and none comes out.
//
// A model-local function stands for the operator where this library is not, and each kind of layer has
// one of its own: the operator has the names "UnifiedKVAttention_1" to "UnifiedKVAttention_15" as well.
#pragma once

#include "ort_api.h"

namespace edge_qkv::ort {

// Adds the operator to the options of a session that has `threads` threads. What is added lives until
// the process ends. Returns ONNX Runtime's error, or null.
OrtStatus* add_attention_op(const OrtApi* table, OrtSessionOptions* options, int threads);

}  // namespace edge_qkv::ort
