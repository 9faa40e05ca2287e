// The cache's memory: reserved, committed as rows arrive, given back.
#include "core/cache.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>

#include "core/memory.h"
#include "core/rows_file.h"
#include "fake_engine.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

namespace {

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

void touch(const CacheView& view, int64_t begin, int64_t end) {
  for (const Slab& slab : view.layout.slabs()) {
    for (int64_t row = begin; row < end; ++row)
      std::memset(view.row(slab, row), 1, view.layout.row_bytes(view.layout.tensors[slab.tensor]));
  }
}

CacheLayout layout(CacheType type, size_t layers, int64_t kv_heads, int64_t dim) {
  return uniform_layout(type, layers, 1, kv_heads, dim);
}

// Whether rows [begin, end) of every slab are those that fill_with_noise gives for `seed`.
bool holds_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed) {
  const CacheMemory expected(view.layout, end);
  fill_with_noise(expected.view(), begin, end, seed);
  for (const Slab& slab : view.layout.slabs()) {
    const size_t row = view.layout.row_bytes(view.layout.tensors[slab.tensor]);
    if (std::memcmp(view.row(slab, begin), expected.view().row(slab, begin),
                    row * static_cast<size_t>(end - begin)) != 0) {
      return false;
    }
  }
  return true;
}

// Whether all live rows are as `touch` writes them.
bool holds_live(const CacheMemory& cache, int64_t length) {
  const CacheLayout& layout = cache.view().layout;
  for (const Slab& slab : layout.slabs()) {
    const size_t row = layout.row_bytes(layout.tensors[slab.tensor]);
    for (const RowSpan& rows : cache.live(slab.tensor, 0, length)) {
      const std::byte *at = cache.view().row(slab, rows.begin), *end = cache.view().row(slab, rows.end);
      if (!std::all_of(at, end, [](std::byte b) { return b == std::byte{1}; }) || row == 0) return false;
    }
  }
  return true;
}

// Bytes that this process has passed to write and its like.
long long written_bytes() { return proc_number("/proc/self/io", "wchar:"); }

double half(const std::byte* p) {  // a normal number
  uint16_t bits;
  std::memcpy(&bits, p, sizeof bits);
  const double magnitude = (1024 + (bits & 0x3ff)) * std::pow(2.0, (bits >> 10 & 31) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

double single(const std::byte* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

}  // namespace

TEST(sizes, "the 1.2B model's cache at 32,768 tokens takes 92,274,688 bytes") {
  const CacheMemory cache(layout(CacheType::kFloat16, 22, 1, 64), 32768);
  EXPECT(cache.view().layout.token_bytes() == 2816);
  EXPECT(cache.reserved_bytes() == 92274688);
  EXPECT(cache.committed_bytes() == 0);
}

TEST(commit, "memory is committed as rows are written") {
  const CacheMemory cache(layout(CacheType::kFloat16, 22, 1, 64), 32768);
  touch(cache.view(), 0, 1000);
  EXPECT(cache.committed_bytes() >= 1000 * 2816);
  EXPECT(cache.committed_bytes() <= 1000 * 2816 + 22 * page());
}

TEST(resident, "rows take in RAM what resident_bytes says, for every layout") {
  for (const CacheLayout& layout : kLayouts) {
    for (const int64_t rows : {0, 1, 64, 1001, 3000}) {
      const CacheMemory cache(layout, 3000);
      fill_with_noise(cache.view(), 0, rows, 1);
      EXPECT(cache.committed_bytes() == resident_bytes(layout, rows, 0, 1));
    }
  }
}

TEST(regions, "slabs start on pages and do not overlap") {
  const CacheMemory cache(layout(CacheType::kFloat32, 3, 2, 62), 7);
  const CacheView& view = cache.view();
  EXPECT(view.capacity >= 7);
  for (size_t i = 0; i < view.tensors.size(); ++i) {
    EXPECT(reinterpret_cast<uintptr_t>(view.tensors[i]) % page() == 0);
    if (i > 0) EXPECT(view.tensors[i] >= view.tensors[i - 1] + view.tensor_bytes(0));
  }
  EXPECT(view.row({1, 1}, 3) == view.tensors[1] + ((1 * view.capacity + 3) * 62) * 4);
}

TEST(release, "released rows give whole pages back and leave the others alone") {
  CacheMemory cache(layout(CacheType::kFloat16, 2, 3, 62), 1001);
  const CacheView& view = cache.view();
  const int64_t all = view.capacity;
  touch(view, 0, all);
  const size_t full = cache.committed_bytes();
  EXPECT(full == cache.reserved_bytes());
  cache.release(500);
  const size_t row = view.layout.row_bytes(view.layout.tensors[0]);
  EXPECT(cache.committed_bytes() <= full - 6 * (static_cast<size_t>(all - 500) * row - page()));
  for (const Slab& slab : view.layout.slabs()) {
    for (int64_t at = 0; at < 500; ++at) {
      const std::byte* data = view.row(slab, at);
      EXPECT(data[0] == std::byte{1} && data[row - 1] == std::byte{1});
    }
  }
  cache.release(0);
  EXPECT(cache.committed_bytes() == 0);
  touch(view, 0, all);
  cache.release(all);
  EXPECT(cache.committed_bytes() == full);
}

TEST(too_large, "a size that overflows or exceeds the address space is refused") {
  const int64_t huge = int64_t{1} << 62;
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat16, 22, 1, 64), huge));
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat32, 1, 1, 1), huge));
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat16, 4096, 4096, 65536), int64_t{1} << 31));
  // Within the address space of the processor, but not of the system.
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat16, 1, 1, 1), int64_t{1} << 46));
}

TEST(fixed_rows, "rows that a model file fixes are the capacity, and cost nothing until written") {
  for (const CacheLayout& layout : kLayouts) {
    const int64_t rows = 3 * static_cast<int64_t>(page());  // whole pages of any row
    CacheMemory cache(layout, 1000, rows);
    EXPECT(cache.view().capacity == rows && cache.committed_bytes() == 0);
    EXPECT(cache.reserved_bytes() ==
           static_cast<size_t>(rows) * static_cast<size_t>(layout.token_bytes()));
    fill_with_noise(cache.view(), 0, 1000, 1);
    EXPECT(cache.committed_bytes() == resident_bytes(layout, 1000, 0, 1));
    cache.release(100);
    EXPECT(cache.committed_bytes() == resident_bytes(layout, 100, 0, 1));
    EXPECT(holds_noise(cache.view(), 0, 100, 1));
    EXPECT(CacheMemory(layout, rows, rows).view().capacity == rows);
  }
}

TEST(unfit_rows, "fixed rows that are too few, or no whole pages of this system, are refused") {
  const int64_t whole = static_cast<int64_t>(page());
  const CacheLayout odd = layout(CacheType::kFloat16, 2, 1, 62);  // 124 bytes a row: 31 * 4
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "rows, too few for a context of", CacheMemory(odd, whole + 1, whole));
  CacheMemory(odd, 100, whole / 4);
  EXPECT_ERROR(EQKV_BAD_PACKAGE,
               "pages of at most " + std::to_string(whole / 2) + " bytes, this system has pages of " +
                   std::to_string(whole) + "; export the model again",
               CacheMemory(odd, 100, whole / 8));
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "of at most 4 bytes", CacheMemory(odd, 100, 101));
  // An int8 cache: whole pages of codes, but not of scales.
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "export the model again",
               CacheMemory(layout(CacheType::kInt8, 1, 1, 64), 64, whole / 64));
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "export the model for a smaller context",
               CacheMemory(odd, 100, int64_t{1} << 62));
}

TEST(noise, "noise is the same for one seed, whatever type and capacity") {
  const CacheMemory a(layout(CacheType::kFloat16, 2, 2, 62), 64),
      b(layout(CacheType::kFloat32, 2, 2, 62), 100);
  const CacheMemory other(layout(CacheType::kFloat16, 2, 2, 62), 64);
  fill_with_noise(a.view(), 0, 64, 7);
  fill_with_noise(b.view(), 0, 20, 7);
  fill_with_noise(b.view(), 20, 64, 7);
  fill_with_noise(other.view(), 0, 64, 8);
  int different = 0, values = 0;
  double sum = 0;
  for (size_t tensor = 0; tensor < 2; ++tensor) {
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t row = 0; row < 64; ++row) {
        for (size_t i = 0; i < 62; ++i) {
          const double value = half(a.view().row({tensor, head}, row) + 2 * i);
          EXPECT(value == single(b.view().row({tensor, head}, row) + 4 * i));
          EXPECT(std::abs(value) >= 0.25 && std::abs(value) < 1);
          different += value != half(other.view().row({tensor, head}, row) + 2 * i);
          sum += value;
          ++values;
        }
      }
    }
  }
  EXPECT(different > values * 0.99);
  EXPECT(std::abs(sum / values) < 0.02);
}

TEST(windows, "at 32,768 tokens local layers take their windows, in the kernel's own accounting") {
  // Five layers with a window of 512 for each that sees everything.
  std::vector<FakeLayer> layers(12, {1, 64, 0, 512, 4});
  layers[5] = layers[11] = {1, 128, 0, 0, 0};
  const CacheLayout mixed = layout_of(CacheType::kFloat16, layers);
  const int64_t length = 32768, chunk = 128;
  const size_t global = 2 * 256 * 32768, sinks = page(),
               local = to_whole_pages(128 * (512 + 512 + 128)) + page() + sinks;
  const TemporaryDirectory directory;
  for (const bool spilled : {false, true}) {
    CacheMemory cache(mixed, length);
    size_t most = 0;
    for (int64_t at = 0; at < length; at += chunk) {
      touch(cache.view(), at, at + chunk);
      if (at % 1024 == 896) most = std::max(most, cache.committed_bytes());
      cache.grow_to(at + chunk);
      if (spilled && at == length / 2) cache.spill(directory.path(), at + chunk);
    }
    EXPECT(most <= (spilled ? global / 2 : global) + 10 * local);
    EXPECT(cache.committed_bytes() <= (spilled ? global / 2 : global) + 10 * local);
    if (!spilled) {
      EXPECT(cache.committed_bytes() >= global + 10 * 128 * (512 + 512));
      EXPECT(resident_bytes(mixed, length, 0, chunk) <= global + 10 * local);
    }
    EXPECT(cache.live_bytes(length) == global + 10 * 128 * (4 + 512 + 512));
    EXPECT(holds_live(cache, length));
  }
}

TEST(spill_windows, "a spill writes live rows only, its file keeps no others, and caches share them") {
  if (written_bytes() < 0) return;  // the kernel does not count
  const TemporaryDirectory directory;
  for (const std::string& place : {directory.path(), std::string()}) {
    for (const CacheLayout& layout : kMixed) {
      CacheMemory cache(layout, 3000), child(layout, 3000);
      int64_t length = 0;
      for (const int64_t grown : {500, 501, 700, 1500, 2500}) {
        touch(cache.view(), length, grown);
        length = grown;
        cache.grow_to(length);
        const long long before = written_bytes();
        cache.spill(place, length);
        EXPECT(static_cast<uint64_t>(written_bytes() - before) <=
               cache.live_bytes(length) + 4 * page() * layout.slabs().size());
        EXPECT(cache.committed_bytes() == 0);
        EXPECT(holds_live(cache, length));
      }
#if defined(SEEK_DATA)
      const std::vector<Slab> slabs = layout.slabs();
      for (size_t i = 0; i < slabs.size(); ++i) {
        const CacheTensor& tensor = layout.tensors[slabs[i].tensor];
        const size_t row = layout.row_bytes(tensor);
        const size_t begin = to_whole_pages(row * static_cast<size_t>(tensor.sinks));
        const size_t end =
            row * static_cast<size_t>(cache.first_live()[slabs[i].tensor]) / page() * page();
        if (begin >= end) continue;
        const off_t data = lseek(cache.file()->file.get(),
                                 static_cast<off_t>(cache.file()->slabs[i] + begin), SEEK_DATA);
        EXPECT(data < 0 || static_cast<uint64_t>(data) >= cache.file()->slabs[i] + end);
      }
#endif
      child.map(cache.file(), length, cache.first_live());
      EXPECT(child.committed_bytes() == 0 && holds_live(child, length));
      touch(child.view(), length, 3000);
      child.grow_to(3000);
      child.spill(place, 3000);
      EXPECT(holds_live(child, 3000) && holds_live(cache, length));
      EXPECT(child.first_live() != cache.first_live());
    }
  }
}

TEST(memory, "the process's memory grows by what is written") {
  const MemoryUse before = memory_use();
  EXPECT(before.resident > 0 && before.peak_resident >= before.resident);
  EXPECT(before.anonymous + before.file_backed == before.resident);
  CacheMemory cache(layout(CacheType::kFloat16, 1, 1, 64), 1 << 18);  // 32 MiB
  const MemoryUse reserved = memory_use();
  EXPECT(reserved.anonymous < before.anonymous + (1 << 20));
  touch(cache.view(), 0, 1 << 18);
  const MemoryUse written = memory_use();
  EXPECT(written.anonymous >= before.anonymous + (31 << 20));
  cache.release(0);
  EXPECT(memory_use().anonymous < before.anonymous + (1 << 20));
  EXPECT(memory_use().peak_resident >= written.resident - (1 << 20));
}

TEST(spill, "a spilled cache takes no memory, reads as before and can be written to") {
  const TemporaryDirectory directory;
  for (const std::string& place : {directory.path(), std::string()}) {
    for (const CacheLayout& layout : kLayouts) {
      CacheMemory cache(layout, 3000);
      fill_with_noise(cache.view(), 0, 2001, 7);
      EXPECT(cache.committed_bytes() > 0);
      cache.spill(place, 2001);
      EXPECT(cache.committed_bytes() == 0);
      EXPECT(holds_noise(cache.view(), 0, 2001, 7));
      EXPECT(cache.committed_bytes() > 0);
      fill_with_noise(cache.view(), 2001, 3000, 8);
      cache.spill(place, 3000);
      EXPECT(cache.committed_bytes() == 0);
      EXPECT(holds_noise(cache.view(), 0, 2001, 7) && holds_noise(cache.view(), 2001, 3000, 8));
    }
  }
  EXPECT(directory.empty());
}

TEST(left_behind, "a spill also gives back what lies behind the rows") {
  const TemporaryDirectory directory;
  CacheMemory cache(kLayouts[2], 3000);
  fill_with_noise(cache.view(), 0, 2500, 1);
  cache.spill(directory.path(), 1000);
  EXPECT(cache.committed_bytes() == 0);
  EXPECT(holds_noise(cache.view(), 0, 1000, 1));
}

TEST(out_of_memory, "rows that were spilled into memory move on to a directory") {
  const TemporaryDirectory directory;
  CacheMemory cache(kLayouts[2], 3000);
  fill_with_noise(cache.view(), 0, 2000, 1);
  cache.spill("", 2000);
  EXPECT(cache.file()->in_memory);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "/absent", cache.spill("/absent", 2000));
  cache.spill(directory.path(), 2000);
  EXPECT(!cache.file()->in_memory && cache.committed_bytes() == 0);
  EXPECT(holds_noise(cache.view(), 0, 2000, 1));
  cache.spill("", 2000);  // of no use: they stay there
  EXPECT(!cache.file()->in_memory);
}

TEST(full_directory, "rows for which the directory of the others has no space go to memory") {
  const TemporaryDirectory directory;
  CacheMemory cache(kLayouts[2], 3000);
  fill_with_noise(cache.view(), 0, 1000, 1);
  cache.spill(directory.path(), 1000);
  fill_with_noise(cache.view(), 1000, 2000, 2);
  const RowsFile* file = cache.file().get();
  {
    const FileSizeLimit limit(page());
    EXPECT_ERROR(EQKV_OUT_OF_MEMORY, directory.path(), cache.spill(directory.path(), 2000));
  }
  EXPECT(cache.file().get() == file);
  cache.spill("", 2000);
  EXPECT(cache.file()->in_memory && cache.committed_bytes() == 0);
  EXPECT(holds_noise(cache.view(), 0, 1000, 1) && holds_noise(cache.view(), 1000, 2000, 2));
}

TEST(spilled_memory, "the rows of a spilled cache are no anonymous memory, read or not") {
  const TemporaryDirectory directory;
  CacheMemory cache(layout(CacheType::kFloat16, 2, 1, 64), 1 << 17);  // 32 MiB
  const uint64_t before = memory_use().anonymous;
  touch(cache.view(), 0, 1 << 17);
  EXPECT(memory_use().anonymous > before + (31 << 20));
  cache.spill(directory.path(), 1 << 17);
  EXPECT(memory_use().anonymous < before + (1 << 20));
  EXPECT(cache.view().row({1, 0}, 0)[123456] == std::byte{1});
  EXPECT(memory_use().anonymous < before + (1 << 20));
}

TEST(respill, "what did not change since the last spill is not written again") {
  if (written_bytes() < 0) return;  // the kernel does not count
  const TemporaryDirectory directory;
  const CacheLayout& layout = kLayouts[2];
  CacheMemory cache(layout, 3000);
  const size_t slabs = layout.slabs().size();
  const auto spill = [&](int64_t length) {
    const long long before = written_bytes();
    cache.spill(directory.path(), length);
    EXPECT(cache.committed_bytes() == 0);
    return static_cast<size_t>(written_bytes() - before);
  };
  const auto pages = [&](int64_t begin, int64_t end) {  // that hold these rows
    const size_t row = layout.row_bytes(layout.tensors[0]);
    return (row * static_cast<size_t>(end) + page() - 1) / page() -
           row * static_cast<size_t>(begin) / page();
  };
  fill_with_noise(cache.view(), 0, 2000, 1);
  EXPECT(spill(2000) == slabs * pages(0, 2000) * page());
  EXPECT(holds_noise(cache.view(), 0, 2000, 1));
  EXPECT(spill(2000) == 0);  // read in between, which makes pages resident
  fill_with_noise(cache.view(), 2000, 2100, 2);
  EXPECT(spill(2100) == slabs * pages(2000, 2100) * page());
  cache.release(1001);
  EXPECT(spill(1001) == 0);
  fill_with_noise(cache.view(), 1001, 2500, 3);
  EXPECT(spill(2500) == slabs * pages(1001, 2500) * page());
  EXPECT(holds_noise(cache.view(), 0, 1001, 1) && holds_noise(cache.view(), 1001, 2500, 3));
  // Rows that were changed in place.
  cache.changed_from(77);
  fill_with_noise(cache.view(), 77, 90, 4);
  EXPECT(spill(2500) == slabs * pages(77, 2500) * page());
  EXPECT(holds_noise(cache.view(), 0, 77, 1) && holds_noise(cache.view(), 77, 90, 4));
  EXPECT(holds_noise(cache.view(), 90, 1001, 1) && holds_noise(cache.view(), 1001, 2500, 3));
}

TEST(shared, "caches of one file share its pages, and none sees what another writes or spills") {
  const TemporaryDirectory directory;
  for (const std::string& place : {directory.path(), std::string()}) {
    CacheMemory parent(kLayouts[2], 3000);
    auto child = std::make_unique<CacheMemory>(kLayouts[2], 3000);
    fill_with_noise(parent.view(), 0, 2001, 1);
    parent.spill(place, 2001);
    child->map(parent.file(), 2001, parent.first_live());
    EXPECT(holds_noise(child->view(), 0, 2001, 1));
    // The parent goes back and on, in the page where the child's rows end and behind it.
    parent.release(1001);
    fill_with_noise(parent.view(), 1001, 2500, 2);
    child->changed_from(2001);
    fill_with_noise(child->view(), 2001, 2100, 3);
    parent.spill(place, 2500);
    EXPECT(parent.file() != child->file());
    EXPECT(holds_noise(child->view(), 0, 2001, 1) && holds_noise(child->view(), 2001, 2100, 3));
    EXPECT(holds_noise(parent.view(), 0, 1001, 1) && holds_noise(parent.view(), 1001, 2500, 2));
    // The child has the first file alone now, and may write to it.
    const RowsFile* file = child->file().get();
    child->spill(place, 2100);
    EXPECT(child->file().get() == file);
    EXPECT(holds_noise(child->view(), 0, 2001, 1) && holds_noise(child->view(), 2001, 2100, 3));
    child.reset();
    EXPECT(holds_noise(parent.view(), 0, 1001, 1) && holds_noise(parent.view(), 1001, 2500, 2));
  }
}

TEST(processes, "after a fork(2) neither process sees what the other writes or spills") {
  const TemporaryDirectory directory;
  for (const std::string& place : {directory.path(), std::string()}) {
    for (const bool child_writes : {false, true}) {
      CacheMemory cache(kLayouts[2], 3000);
      fill_with_noise(cache.view(), 0, 2001, 1);
      cache.spill(place, 2001);
      const auto write = [&] {
        cache.release(1001);
        fill_with_noise(cache.view(), 1001, 2500, 2);
        cache.spill(place, 2500);
        const RowsFile* file = cache.file().get();
        cache.changed_from(2000);
        fill_with_noise(cache.view(), 2000, 2500, 3);
        cache.spill(place, 2500);  // the new file is this process's own
        return cache.file().get() == file && holds_noise(cache.view(), 0, 1001, 1) &&
               holds_noise(cache.view(), 1001, 2000, 2) && holds_noise(cache.view(), 2000, 2500, 3);
      };
      int done[2];
      EXPECT(pipe(done) == 0);
      const pid_t child = fork();
      if (child == 0) {
        close(done[1]);
        char byte;
        if (!child_writes && read(done[0], &byte, 1) != 0) _exit(2);
        _exit(child_writes ? write() : holds_noise(cache.view(), 0, 2001, 1));
      }
      if (!child_writes) EXPECT(write());
      close(done[1]);
      int status = 0;
      waitpid(child, &status, 0);
      close(done[0]);
      EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
      if (child_writes) EXPECT(holds_noise(cache.view(), 0, 2001, 1));
    }
  }
}

TEST(mappings, "a spilled cache takes a handful of mappings, however many slabs it has") {
  const TemporaryDirectory directory;
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  };
  const CacheLayout layout = uniform_layout(CacheType::kFloat16, 24, 2, 8, 64);
  const auto before = mappings();
  if (before == 0) return;  // the kernel does not say
  CacheMemory parent(layout, 500), child(layout, 500);
  fill_with_noise(parent.view(), 0, 100, 1);
  parent.spill(directory.path(), 100);
  child.map(parent.file(), 100, parent.first_live());
  EXPECT(mappings() <= before + 8);
  child.changed_from(100);
  fill_with_noise(child.view(), 100, 200, 2);
  child.spill(directory.path(), 200);  // to a file of its own
  child.release(150);
  fill_with_noise(child.view(), 150, 300, 3);
  child.spill(directory.path(), 300);  // to the same
  EXPECT(mappings() <= before + 8);
  EXPECT(parent.committed_bytes() == 0 && child.committed_bytes() == 0);
  fill_with_noise(parent.view(), 100, 500, 4);
  EXPECT(holds_noise(parent.view(), 0, 100, 1) && holds_noise(parent.view(), 100, 500, 4));
  EXPECT(holds_noise(child.view(), 0, 100, 1) && holds_noise(child.view(), 100, 150, 2));
  EXPECT(holds_noise(child.view(), 150, 300, 3));
}

TEST(one_copy, "two caches of one file take the memory of one, and of the pages that they change") {
  const TemporaryDirectory directory;
  const int64_t rows = 1 << 17;  // 32 MiB
  CacheMemory parent(layout(CacheType::kFloat16, 2, 1, 64), rows), child(parent.view().layout, rows);
  const auto is_touched = [&](const CacheMemory& cache) {
    const std::byte* at = cache.view().row({0, 0}, 0);
    return std::all_of(at, at + cache.reserved_bytes(), [](std::byte b) { return b == std::byte{1}; });
  };
  const auto pss = [] { return proc_number("/proc/self/smaps_rollup", "Pss:"); };  // KiB
  const long long pss_before = pss();
  const uint64_t before = memory_use().anonymous;
  touch(parent.view(), 0, rows);
  parent.spill(directory.path(), rows);
  child.map(parent.file(), rows, parent.first_live());
  EXPECT(is_touched(parent) && is_touched(child));
  EXPECT(memory_use().anonymous < before + (1 << 20));
  EXPECT(child.committed_bytes() == child.reserved_bytes());
  // A page counts half for each of the two places it is mapped at.
  if (pss_before >= 0) EXPECT(pss() > pss_before + (31 << 10) && pss() < pss_before + (35 << 10));
  child.view().row({1, 0}, 0)[5] = std::byte{99};
  EXPECT(memory_use().anonymous < before + (1 << 20));
  EXPECT(is_touched(parent) && !is_touched(child));
}

TEST(no_directory, "a spill to a directory that cannot be written to names it") {
  CacheMemory cache(kLayouts[1], 500);
  fill_with_noise(cache.view(), 0, 500, 1);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "/absent/directory", cache.spill("/absent/directory", 500));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "can be written to", cache.spill("/proc", 500));
  EXPECT(holds_noise(cache.view(), 0, 500, 1) && !cache.file());
}

TEST(no_space, "a spill that runs out of space half-way leaves every row as it was") {
  const TemporaryDirectory directory;
  CacheMemory cache(kLayouts[2], 3000);
  fill_with_noise(cache.view(), 0, 2000, 1);
  const auto refused = [&](int64_t length) {
    const FileSizeLimit limit(cache.reserved_bytes() / 2);
    EXPECT_ERROR(EQKV_OUT_OF_MEMORY, directory.path(), cache.spill(directory.path(), length));
  };
  refused(2000);
  EXPECT(holds_noise(cache.view(), 0, 2000, 1) && !cache.file());
  cache.spill(directory.path(), 2000);
  // The same with a file that is written again from some row on.
  cache.release(1500);
  fill_with_noise(cache.view(), 1500, 2500, 2);
  refused(2500);
  EXPECT(holds_noise(cache.view(), 0, 1500, 1) && holds_noise(cache.view(), 1500, 2500, 2));
  cache.release(1700);
  fill_with_noise(cache.view(), 1700, 2500, 3);
  cache.spill(directory.path(), 2500);
  EXPECT(holds_noise(cache.view(), 0, 1500, 1) && holds_noise(cache.view(), 1500, 1700, 2));
  EXPECT(holds_noise(cache.view(), 1700, 2500, 3));
  EXPECT(directory.empty());
}

#if defined(__linux__)
TEST(no_mappings,
     "without mappings left a spill is refused, with every row as it was, and rows are read instead") {
  const int64_t most = proc_number("/proc/sys/vm/max_map_count", "");
  if (most < 0 || most > 200000) return;  // too many to use up here
  const pid_t child = fork();             // which alone runs out of them
  if (child == 0) {
    int good = 0;
    CacheMemory cache(kLayouts[2], 3000), source(kLayouts[2], 3000), reader(kLayouts[2], 3000);
    fill_with_noise(cache.view(), 0, 2000, 1);
    fill_with_noise(source.view(), 0, 2000, 2);
    source.spill("", 2000);
    const size_t pages = 2 * static_cast<size_t>(most);
    auto* at = static_cast<char*>(
        mmap(nullptr, pages * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    size_t i = 1;
    while (i < pages && mprotect(at + i * page(), page(), PROT_READ) == 0) i += 2;
    for (int back = 0; back < 3; ++back) mprotect(at + (i -= 2) * page(), page(), PROT_NONE);
    try {
      cache.spill("", 2000);  // in memory: two mappings a slab
    } catch (const Error& error) {
      good += error.status() == EQKV_OUT_OF_MEMORY && std::strstr(error.what(), "cannot be mapped");
    }
    reader.map(source.file(), 2000, source.first_live());
    munmap(at, pages * page());
    good += !reader.file() && holds_noise(reader.view(), 0, 2000, 2);
    good += cache.committed_bytes() < cache.reserved_bytes() / 3 * 2;  // it was half-way
    good += holds_noise(cache.view(), 0, 2000, 1);
    cache.spill("", 2000);
    good += cache.committed_bytes() == 0 && holds_noise(cache.view(), 0, 2000, 1);
    _exit(good);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 5);
}
#endif
