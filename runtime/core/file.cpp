#include "file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

namespace edge_qkv {

static_assert(sizeof(off_t) == 8,
              "Build with -D_FILE_OFFSET_BITS=64: a cache may be larger than 2 GiB.");

namespace {

// Calls transfer(at, bytes, offset), which may do less than it is asked to, until all is done.
template <class Byte, class Transfer>
bool all(Byte* at, size_t bytes, uint64_t offset, Transfer transfer) {
  while (bytes > 0) {
    errno = 0;
    const ssize_t done = transfer(at, std::min(bytes, size_t{1} << 30), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    at += done;
    bytes -= static_cast<size_t>(done);
    offset += static_cast<uint64_t>(done);
  }
  return true;
}

}  // namespace

bool write_all(const File& file, const void* data, size_t bytes, uint64_t offset) {
  return all(static_cast<const char*>(data), bytes, offset,
             [&](const char* at, size_t n, off_t to) { return pwrite(file.get(), at, n, to); });
}

bool read_all(const File& file, void* data, size_t bytes, uint64_t offset) {
  return all(static_cast<char*>(data), bytes, offset,
             [&](char* at, size_t n, off_t from) { return pread(file.get(), at, n, from); });
}

std::string absolute_directory(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> whole(realpath(path.c_str(), nullptr), std::free);
  const std::string resolved = whole ? whole.get() : path;
  return resolved.substr(0, resolved.rfind('/') + 1);
}

}  // namespace edge_qkv
