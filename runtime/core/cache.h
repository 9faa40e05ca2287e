// The memory of a session's caches: where the rows lie, how much of it is in RAM, how it is given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"

namespace edge_qkv {

// Where the caches of a session are: a tensor is [G, C, dim], or [G, C] where it holds scales, and its C
// rows of a kv head, a slab, lie one after the other. Does not own the memory.
struct CacheView {
  CacheLayout layout;
  int64_t capacity = 0;             // C, in tokens: of every tensor
  std::vector<std::byte*> tensors;  // as in layout.tensors

  size_t slab_bytes(size_t tensor) const {
    return layout.row_bytes(layout.tensors[tensor]) * static_cast<size_t>(capacity);
  }
  size_t tensor_bytes(size_t tensor) const {
    return slab_bytes(tensor) * static_cast<size_t>(layout.tensors[tensor].kv_heads);
  }
  size_t bytes() const {  // of all tensors
    size_t sum = 0;
    for (size_t tensor = 0; tensor < layout.tensors.size(); ++tensor) sum += tensor_bytes(tensor);
    return sum;
  }
  std::byte* row(const Slab& slab, int64_t row) const {
    return tensors[slab.tensor] + static_cast<size_t>(slab.head) * slab_bytes(slab.tensor) +
           static_cast<size_t>(row) * layout.row_bytes(layout.tensors[slab.tensor]);
  }
};

struct RowsFile;

// Address space for the tensors of a CacheView. Nothing is in RAM until rows are written: 1,000 tokens
// of a context of 32,768 cost 1,000 tokens, rounded up to pages.
//
// The capacity of the view is `context` rounded up until every slab is whole pages, or the `rows` that a
// model file fixes: each slab can then be mapped from a file, and given back, by itself. The mapping is
// private and lies where the rows were: whoever uses the rows sees no difference, what nobody uses costs
// no RAM, and a page that is written to becomes this cache's own.
class CacheMemory {
 public:
  // Throws Error with EQKV_OUT_OF_MEMORY where the address space does not hold it, with EQKV_BAD_PACKAGE
  // where `rows` (0: none are fixed) are fewer than the context or no whole pages of this system. All
  // other sizes >= 1.
  CacheMemory(const CacheLayout& layout, int64_t context, int64_t rows = 0);
  ~CacheMemory();
  CacheMemory(const CacheMemory&) = delete;
  CacheMemory& operator=(const CacheMemory&) = delete;

  const CacheView& view() const { return view_; }
  size_t reserved_bytes() const { return reserved_; }

  // In RAM for this process now, whole pages, mapped ones included. From /proc/self/pagemap; mincore,
  // where that is missing, also counts pages of a mapped file that only the kernel's cache holds.
  size_t committed_bytes() const;

  // Gives rows [length, C) back to the system, where they fill whole pages. Their contents are lost.
  void release(int64_t length);

  // Rows [row, C) are about to change. `release` and `map` know by themselves, and so does `spill` of
  // the rows behind those that it spilled before; only who changes rows in place has to say so.
  void changed_from(int64_t row);

  // Moves rows [0, length) to a file without a name in `directory` (empty: in memory), maps them from
  // there and gives the rest back: afterwards no page is in RAM. Where the rows are in a file already,
  // those that are unchanged are not written again, unless some did change and that file is a snapshot,
  // or lies elsewhere, or another cache or process uses it; then all go to a new one. Throws Error; the
  // rows are then as before.
  void spill(const std::string& directory, int64_t length);

  // Replaces rows [0, length) by those in `file`, which must hold as many in a layout like this one, and
  // gives the rest back. Where the system does not map them they are read. Throws Error; all rows are
  // then undefined.
  void map(std::shared_ptr<const RowsFile> file, int64_t length);

  // The file that all rows were last mapped from, or null.
  const std::shared_ptr<const RowsFile>& file() const { return file_; }

 private:
  size_t row_bytes(const Slab& slab) const {
    return view_.layout.row_bytes(view_.layout.tensors[slab.tensor]);
  }
  bool map_slab(const RowsFile& file, int64_t slab, int64_t length);

  CacheView view_;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  // Rows [0, in_file_) of file_ are equal to those here, whatever file each page is mapped from.
  std::shared_ptr<const RowsFile> file_;
  int64_t in_file_ = 0;
};

// Writes reproducible noise into rows [begin, end) of every tensor: the same values for the same seed,
// whatever type and capacity the cache has, each +-[0.25, 1); an int8 cache rounds them.
void fill_with_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed);

}  // namespace edge_qkv
