#include "memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "error.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace edge_qkv {
namespace {

// A file of lines "Name:   123 kB", as Linux writes them.
class KilobyteTable {
 public:
  explicit KilobyteTable(const char* path) {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "re"), std::fclose);
    if (!file) return;
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, file.get())) text_.append(buffer, n);
  }

  // Bytes of the line `name`; false where there is none.
  bool get(const std::string& name, uint64_t* bytes) const {
    const std::string label = "\n" + name + ":";
    const size_t at = text_.find(label);
    uint64_t kilobytes = 0;
    if (at == std::string::npos ||
        std::sscanf(text_.c_str() + at + label.size(), "%" SCNu64, &kilobytes) != 1) {
      return false;
    }
    *bytes = kilobytes * 1024;
    return true;
  }

 private:
  std::string text_ = "\n";  // so that the first line is found like the others
};

// Calls visit(begin, end, path) for each mapping of a file; false where the system does not tell.
template <class Visit>
bool each_mapping(Visit visit) {
  std::ifstream maps("/proc/self/maps");
  if (!maps) return false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    int path = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %*s %n", &begin, &end, &path) ==
            2 &&
        path > 0) {
      visit(begin, end, line.c_str() + path);
    }
  }
  return true;
}

}  // namespace

MemoryUse memory_use() {
  MemoryUse use;
  // smaps_rollup counts pages; the Rss lines of status may lag behind by some dozen pages a thread, and
  // count shared memory as file-backed. They are the fallback of old kernels and of sandboxes.
  const KilobyteTable rollup("/proc/self/smaps_rollup");
  const KilobyteTable status("/proc/self/status");
  if (rollup.get("Rss", &use.resident) && rollup.get("Anonymous", &use.anonymous)) {
    use.file_backed = use.resident - std::min(use.anonymous, use.resident);
  } else if (status.get("VmRSS", &use.resident) && status.get("RssAnon", &use.anonymous)) {
    use.file_backed = use.resident - std::min(use.anonymous, use.resident);
  }
  if (!status.get("VmHWM", &use.peak_resident)) {
    struct rusage usage = {};
    if (getrusage(RUSAGE_SELF, &usage) != 0) {
      throw Error(EQKV_INVALID_ARGUMENT, "This system does not report the memory of a process.");
    }
#if defined(__APPLE__)
    use.peak_resident = static_cast<uint64_t>(usage.ru_maxrss);
#else
    use.peak_resident = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
#endif
  }
  // The two sources are read one after the other.
  use.peak_resident = std::max(use.peak_resident, use.resident);
  return use;
}

void release_heap() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

void release_file_pages(const std::string& directory) {
#if defined(MADV_PAGEOUT)
  each_mapping([&](uintptr_t begin, uintptr_t end, const char* path) {
    if (std::strncmp(path, directory.c_str(), directory.size()) != 0) return;
    // Unlike MADV_DONTNEED, this never loses what a private mapping has changed.
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_PAGEOUT);
  });
#else
  (void)directory;
#endif
}

bool is_mapped(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> whole(realpath(path.c_str(), nullptr), std::free);
  bool found = false;
  const bool told = each_mapping([&](uintptr_t, uintptr_t, const char* mapped) {
    found = found || (whole && std::strcmp(mapped, whole.get()) == 0);
  });
  return found || !told;
}

}  // namespace edge_qkv
