// A cache's rows in a file, from which they can be mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "file.h"

namespace edge_qkv {

// An open file that holds the first rows of every slab, one after the other, and no byte of which
// changes while two caches share it.
struct RowsFile {
  File file;
  std::vector<uint64_t> slabs;  // [layout.slabs()]: where each starts in the file
  std::string place;            // for messages: the directory, or the path
  bool temporary = false;       // made for a cache: its only one may write rows again, until a fork(2)
  bool in_memory = false;       // and in no directory
  int64_t capacity = 0;         // rows that every slab has room for within the file; 0: those it holds
  uint64_t forks = 0;           // forks(), when it was made
};

// How often fork(2) was called by this process and those it comes from. A file from before a fork
// belongs to two processes, each of which would see in its mapping what the other writes.
uint64_t forks();

// A file without a name, gone with its last use, that has room for every row of `view` and holds none
// yet. It lies in `directory`, or in memory where that is empty. Throws Error where it cannot be made.
std::shared_ptr<const RowsFile> make_rows_file(const std::string& directory, const CacheView& view);

}  // namespace edge_qkv
