#include "rows_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "error.h"

namespace edge_qkv {
namespace {

std::atomic<uint64_t> fork_count{0};

File in_memory() {
#if defined(SYS_memfd_create)
  constexpr unsigned kCloseOnExec = 1;  // MFD_CLOEXEC, which older headers lack like the function
  return File(static_cast<int>(syscall(SYS_memfd_create, "edge_qkv", kCloseOnExec)));
#else
  errno = ENOSYS;
  return File();
#endif
}

File without_name(const std::string& directory) {
#if defined(O_TMPFILE)
  if (File file{open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)}) return file;
#endif
  // A file system without O_TMPFILE.
  std::string path = directory + "/edge_qkv-XXXXXX";
  File file(mkostemp(path.data(), O_CLOEXEC));
  if (file) unlink(path.c_str());
  return file;
}

}  // namespace

uint64_t forks() {
  [[maybe_unused]] static const int counted = [] {
    const auto count = [] { ++fork_count; };
    return pthread_atfork(nullptr, count, count);
  }();
  return fork_count;
}

std::shared_ptr<const RowsFile> make_rows_file(const std::string& directory, const CacheView& view) {
  auto rows = std::make_shared<RowsFile>();
  rows->temporary = true;
  rows->forks = forks();
  rows->in_memory = directory.empty();
  rows->file = rows->in_memory ? in_memory() : without_name(directory);
  rows->place = rows->in_memory ? "memory" : directory;
  if (!rows->file) {
    throw Error(EQKV_INVALID_ARGUMENT, "A cache cannot be moved to a file in " + rows->place + ": " +
                                           std::strerror(errno) +
                                           "; name a directory that can be written to.");
  }
  // As the slabs lie in the cache: there is room to grow, and what was not written takes no space. With
  // the size of the cache, whole slabs can be mapped, which the kernel joins to one mapping. Not in
  // memory: there the first write to a page of a private mapping also takes memory for the file's page.
  if (!rows->in_memory && ftruncate(rows->file.get(), static_cast<off_t>(view.bytes())) == 0) {
    rows->capacity = view.capacity;
  }
  for (const Slab& slab : view.layout.slabs()) {
    rows->slabs.push_back(static_cast<uint64_t>(view.row(slab, 0) - view.tensors[0]));
  }
  return rows;
}

}  // namespace edge_qkv
