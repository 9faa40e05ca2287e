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

// Rows [begin, end), begin < end.
struct RowSpan {
  int64_t begin, end;
};

// Address space for the tensors of a CacheView. Nothing is in RAM until rows are written: 1,000 tokens
// of a context of 32,768 cost 1,000 tokens, rounded up to pages.
//
// Of a tensor with a window, rows that no query will see are given back as the cache grows: what lies
// between the sinks and the last window + margin rows. A row stays where it is; whole pages before the
// first live one are gone.
//
// The capacity of the view is `context` rounded up until every slab is whole pages, or the `rows` that a
// model file fixes: each slab can then be mapped from a file, and given back, by itself. The mapping is
// private and lies where the rows were: whoever uses the rows sees no difference, what nobody uses costs
// no RAM, and a page that is written to becomes this cache's own.
class CacheMemory {
 public:
  // Throws Error with EQKV_OUT_OF_MEMORY where the address space does not hold it, with EQKV_BAD_PACKAGE
  // where `rows` (0: none are fixed) are fewer than the context or no whole pages of this system. All
  // other sizes >= 1; margin as in live_rows.
  CacheMemory(const CacheLayout& layout, int64_t context, int64_t rows = 0, int64_t margin = 0);
  ~CacheMemory();
  CacheMemory(const CacheMemory&) = delete;
  CacheMemory& operator=(const CacheMemory&) = delete;

  const CacheView& view() const { return view_; }
  size_t reserved_bytes() const { return reserved_; }

  // In RAM for this process now, whole pages, mapped ones included. From /proc/self/pagemap; mincore,
  // where that is missing, also counts pages of a mapped file that only the kernel's cache holds.
  size_t committed_bytes() const;

  // Rows [0, length) are written, or are about to be: gives back those that are live no longer.
  void grow_to(int64_t length);

  // [tensors]: rows [0, sinks) and from this one on are live; all, where it is 0.
  const std::vector<int64_t>& first_live() const { return first_live_; }
  // The live rows of a tensor in [begin, end), at most two ranges.
  std::vector<RowSpan> live(size_t tensor, int64_t begin, int64_t end) const;
  // What these take, of all tensors, while the cache holds `length`.
  uint64_t live_bytes(int64_t length) const;
  // Whether every row that a query at position `length` or a later one sees is live.
  bool holds_visible(int64_t length) const;

  // Gives rows [length, C) back to the system, where they fill whole pages. Their contents are lost.
  // Rows are written next from `length` on, which is 0 or one that holds_visible allows.
  void release(int64_t length);

  // Rows [row, C) are about to change. `release` and `map` know by themselves, and so does `spill` of
  // the rows behind those that it spilled before; only who changes rows in place has to say so.
  void changed_from(int64_t row);

  // Rows [first, last) of `length` are dropped, and the live ones behind them were moved up. `drops`
  // says beforehand whether all that later queries see is live then.
  bool drops(int64_t first, int64_t last, int64_t length) const;
  void drop(int64_t first, int64_t last, int64_t length);

  // Moves rows [0, length) to a file without a name in `directory` (empty: in memory), maps them from
  // there and gives the rest back: afterwards no page is in RAM. Where the rows are in a file already,
  // those that are unchanged are not written again, unless some did change and that file is a snapshot,
  // or lies elsewhere, or another cache or process uses it; then all go to a new one. Throws Error; the
  // rows are then as before.
  void spill(const std::string& directory, int64_t length);

  // Replaces rows [0, length) by those in `file`, which must hold as many in a layout like this one, of
  // which those from `first_live` on are live, and gives the rest back. Where the system does not map
  // them they are read. Throws Error; all rows are then undefined.
  void map(std::shared_ptr<const RowsFile> file, int64_t length, const std::vector<int64_t>& first_live);

  // The file that all rows were last mapped from, or null.
  const std::shared_ptr<const RowsFile>& file() const { return file_; }

 private:
  size_t row_bytes(size_t tensor) const { return view_.layout.row_bytes(view_.layout.tensors[tensor]); }
  void set_first_live(size_t tensor, int64_t first);
  LiveRows after_drop(size_t tensor, int64_t first, int64_t last, int64_t length) const;
  bool map_slab(const RowsFile& file, size_t slab, int64_t length);
  void drop_from_file() const;

  CacheView view_;
  const std::vector<Slab> slabs_;  // of the layout
  const int64_t margin_;
  std::vector<int64_t> first_live_;
  std::byte* base_ = nullptr;
  size_t reserved_ = 0;
  // Live rows in [0, in_file_) are in file_ as they are here, whatever file each page is mapped from.
  std::shared_ptr<const RowsFile> file_;
  int64_t in_file_ = 0;
};

// Writes reproducible noise into rows [begin, end) of every tensor, or of one: the same values for the
// same seed, whatever type and capacity the cache has, each +-[0.25, 1); an int8 cache rounds them.
void fill_with_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed);
void fill_with_noise(const CacheView& view, size_t tensor, int64_t begin, int64_t end, uint64_t seed);

}  // namespace edge_qkv
