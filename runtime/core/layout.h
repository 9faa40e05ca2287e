// What a model caches for a token, tensor by tensor, and which of its rows a session keeps in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/attention.h"

namespace edge_qkv {

// kRow: key and value at once.
enum class Part : int { kRow, kKey, kValue };

// [1, G, C, dim], or [1, G, C] where it holds scales. No more than numbers: it crosses into plugins.
struct CacheTensor {
  int64_t layer = 0;
  Part part = Part::kRow;
  bool scales = false;  // of the rows of this layer and part: fp16, one a row
  int64_t kv_heads = 0;
  int64_t dim = 0;  // values of a row
  // What all layers that read it see, as in attention/attention.h; a window of 0: all rows.
  int64_t window = 0, sinks = 0;
};

// The rows of one kv head of one tensor.
struct Slab {
  size_t tensor;
  int64_t head;
};

// Layer by layer; in a layer its rows, or its keys and then its values; after them, with a type that has
// scales, theirs in the same order. A layer that reads another's rows has none.
struct CacheLayout {
  CacheType type = CacheType::kFloat16;
  std::vector<CacheTensor> tensors;

  // Bytes that a token takes in one kv head of the tensor.
  size_t row_bytes(const CacheTensor& tensor) const {
    return static_cast<size_t>(tensor.scales ? cache_type_info(type).scale_bytes
                                             : cache_type_info(type).value_bytes * tensor.dim);
  }
  // Bytes that a token takes over all tensors.
  int64_t token_bytes() const;
  std::vector<Slab> slabs() const;  // tensor by tensor, head by head
};

// "kv", "key" or "value", and "_scale" after it: what graphs put before the number of the layer.
std::string part_name(const CacheTensor& tensor);

// Rows [0, sinks) and [first, length), sinks <= first: all are there where `first` is 0.
struct LiveRows {
  int64_t sinks, first, length;
  int64_t count() const { return sinks + length - first; }
};

// The rows of a tensor that a session of `length` tokens keeps, `margin` of them only for a rewind (0:
// as many as the window).
LiveRows live_rows(const CacheTensor& tensor, int64_t length, int64_t margin);

// The rows that queries from position `length` on see.
LiveRows visible_rows(const CacheTensor& tensor, int64_t length);

size_t page_bytes();  // of this system

// `bytes` rounded up to whole pages.
size_t to_whole_pages(size_t bytes);

// The most that the rows take in RAM until there are `length`, of which each evaluation adds at most
// `chunk`: those of each slab lie in whole pages of their own, live rows at either end of theirs. Never
// falls as length or chunk grows.
size_t resident_bytes(const CacheLayout& layout, int64_t length, int64_t margin, int64_t chunk);

}  // namespace edge_qkv
