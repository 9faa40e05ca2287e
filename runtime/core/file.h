// Files as descriptors: closed by their owner, read and written whole.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace edge_qkv {

class File {
 public:
  explicit File(int descriptor = -1) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

// Writes all of `data` at `offset`; else returns false with errno set.
bool write_all(const File& file, const void* data, size_t bytes, uint64_t offset);

// Reads all of `data` from `offset`; else returns false with errno set, to 0 where the file ends before.
bool read_all(const File& file, void* data, size_t bytes, uint64_t offset);

// Of the file at `path`, links resolved, with a slash at its end.
std::string absolute_directory(const std::string& path);

}  // namespace edge_qkv
