// A cache's rows in a file, from which they can be mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "file.h"

namespace edge_qkv {

// Bytes [begin, end) of a slab.
struct ByteGap {
  uint64_t begin = 0, end = 0;
};

// An open file that holds the live ones of the first rows of every slab, and no byte of which changes
// while two caches share it. A slab lies there as it does in memory, without the gap of its tensor, in
// which no live row is.
struct RowsFile {
  File file;
  std::vector<uint64_t> slabs;  // as in layout.slabs(): where each starts in the file
  std::vector<ByteGap> gaps;    // as in layout.tensors, or empty: there are none
  std::string place;            // for messages: the directory, or the path
  bool temporary = false;       // made for a cache: its only one may write rows again, until a fork(2)
  bool in_memory = false;       // and in no directory
  int64_t capacity = 0;         // rows that every slab has room for within the file; 0: those it holds
  uint64_t forks = 0;           // forks(), when it was made

  ByteGap gap(size_t tensor) const { return gaps.empty() ? ByteGap{} : gaps[tensor]; }
  // Where byte `at` of a slab of the tensor is in the file; not of one in the gap.
  uint64_t offset(size_t slab, size_t tensor, uint64_t at) const {
    const ByteGap between = gap(tensor);
    return slabs[slab] + at - (at >= between.end ? between.end - between.begin : 0);
  }
};

// How often fork(2) was called by this process and those it comes from. A file from before a fork
// belongs to two processes, each of which would see in its mapping what the other writes.
uint64_t forks();

// A file without a name, gone with its last use, that has room for every row of `view` and holds none
// yet. It lies in `directory`, or in memory where that is empty. Throws Error where it cannot be made.
std::shared_ptr<const RowsFile> make_rows_file(const std::string& directory, const CacheView& view);

}  // namespace edge_qkv
