// The memory of a session's caches: where the rows lie, how much of it is in RAM, how it is given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace edge_qkv {

// Where an engine keeps the caches of a session. A tensor is [G, C, D]: the C rows of a kv head lie one
// after the other. Unified models have one tensor a layer; with a separate V each layer's key cache is
// followed by its value cache. Does not own the memory.
struct CacheView {
  CacheType type = CacheType::kFloat16;
  int64_t kv_heads = 0;  // G
  int64_t capacity = 0;  // C, in tokens
  int64_t head_dim = 0;  // D
  std::vector<std::byte*> tensors;

  size_t element_bytes() const { return static_cast<size_t>(cache_value_bytes(type)); }
  size_t row_bytes() const { return element_bytes() * static_cast<size_t>(head_dim); }
  size_t head_bytes() const { return row_bytes() * static_cast<size_t>(capacity); }
  size_t tensor_bytes() const { return head_bytes() * static_cast<size_t>(kv_heads); }
  // Bytes that a token takes over all tensors.
  size_t token_bytes() const { return row_bytes() * static_cast<size_t>(kv_heads) * tensors.size(); }
  std::byte* row(size_t tensor, int64_t head, int64_t row) const {
    return tensors[tensor] + static_cast<size_t>(head) * head_bytes() +
           static_cast<size_t>(row) * row_bytes();
  }
};

// Address space for the tensors of a CacheView. Nothing is in RAM until rows are written: 1,000 tokens
// of a context of 32,768 cost 1,000 tokens, rounded up to pages.
class CacheMemory {
 public:
  // Throws Error with EQKV_OUT_OF_MEMORY where the address space does not hold it. All sizes >= 1.
  CacheMemory(CacheType type, int64_t tensors, int64_t kv_heads, int64_t capacity, int64_t head_dim);
  ~CacheMemory();
  CacheMemory(const CacheMemory&) = delete;
  CacheMemory& operator=(const CacheMemory&) = delete;

  const CacheView& view() const { return view_; }
  size_t reserved_bytes() const { return reserved_; }
  size_t committed_bytes() const;  // in RAM now, whole pages

  // Gives rows [length, C) back to the system, where they fill whole pages. Their contents are lost.
  void release(int64_t length);

 private:
  CacheView view_;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
};

// Writes reproducible noise into rows [begin, end) of every tensor: the same values for the same seed,
// whatever type and capacity the cache has, each +-[0.25, 1).
void fill_with_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed);

}  // namespace edge_qkv
