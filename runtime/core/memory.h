// The memory of this process, from the operating system's own accounting.
#pragma once

#include <cstdint>
#include <string>

namespace edge_qkv {

struct MemoryUse {
  uint64_t resident = 0;       // bytes in RAM now
  uint64_t anonymous = 0;      // of these, not backed by a file
  uint64_t file_backed = 0;    // of these, backed by a file
  uint64_t peak_resident = 0;  // largest `resident` so far
};

// Throws Error where the system does not say.
MemoryUse memory_use();

// Gives the C library's free memory back to the system, where it can.
void release_heap();

// Gives back the pages of this process's mappings of files below `directory`: they are read again when
// they are used. Only a saving: does nothing where the system cannot.
void release_file_pages(const std::string& directory);

// Whether this process has a mapping of the file at `path`; true where the system does not tell.
bool is_mapped(const std::string& path);

}  // namespace edge_qkv
