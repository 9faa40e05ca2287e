// The cache's memory: reserved, committed as rows arrive, given back.
#include "core/cache.h"

#include <unistd.h>

#include <cmath>
#include <cstring>

#include "core/memory.h"
#include "test.h"

using namespace edge_qkv;

namespace {

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

void touch(const CacheView& view, int64_t begin, int64_t end) {
  for (int64_t i = 0; i < view.layout.tensors(); ++i) {
    for (int64_t head = 0; head < view.layout.kv_heads; ++head) {
      for (int64_t row = begin; row < end; ++row)
        std::memset(view.row(i, head, row), 1, view.layout.row_bytes(i));
    }
  }
}

// type, layers, kv heads, head_dim
CacheLayout layout(CacheType type, int64_t layers, int64_t kv_heads, int64_t head_dim) {
  return {type, layers, 1, kv_heads, head_dim};
}

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

TEST(regions, "slabs start on pages and do not overlap") {
  const CacheMemory cache(layout(CacheType::kFloat32, 3, 2, 62), 7);
  const CacheView& view = cache.view();
  EXPECT(view.capacity >= 7);
  for (size_t i = 0; i < view.tensors.size(); ++i) {
    EXPECT(reinterpret_cast<uintptr_t>(view.tensors[i]) % page() == 0);
    if (i > 0) EXPECT(view.tensors[i] >= view.tensors[i - 1] + view.tensor_bytes(0));
  }
  EXPECT(view.row(1, 1, 3) == view.tensors[1] + ((1 * view.capacity + 3) * 62) * 4);
}

TEST(release, "released rows give whole pages back and leave the others alone") {
  CacheMemory cache(layout(CacheType::kFloat16, 2, 3, 62), 1001);
  const CacheView& view = cache.view();
  const int64_t all = view.capacity;
  touch(view, 0, all);
  const size_t full = cache.committed_bytes();
  EXPECT(full == cache.reserved_bytes());
  cache.release(500);
  const size_t row = view.layout.row_bytes(0);
  EXPECT(cache.committed_bytes() <= full - 6 * (static_cast<size_t>(all - 500) * row - page()));
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t head = 0; head < 3; ++head) {
      for (int64_t at = 0; at < 500; ++at) {
        const std::byte* data = view.row(i, head, at);
        EXPECT(data[0] == std::byte{1} && data[row - 1] == std::byte{1});
      }
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
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context", CacheMemory(layout(CacheType::kFloat16, 22, 1, 64), huge));
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context", CacheMemory(layout(CacheType::kFloat32, 1, 1, 1), huge));
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat16, 4096, 4096, 65536), int64_t{1} << 31));
  // Within the address space of the processor, but not of the system.
  EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "smaller context",
               CacheMemory(layout(CacheType::kFloat16, 1, 1, 1), int64_t{1} << 46));
}

TEST(noise, "noise is the same for one seed, whatever type and capacity") {
  const CacheMemory a(layout(CacheType::kFloat16, 2, 2, 62), 64), b(layout(CacheType::kFloat32, 2, 2, 62), 100);
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
          const double value = half(a.view().row(tensor, head, row) + 2 * i);
          EXPECT(value == single(b.view().row(tensor, head, row) + 4 * i));
          EXPECT(std::abs(value) >= 0.25 && std::abs(value) < 1);
          different += value != half(other.view().row(tensor, head, row) + 2 * i);
          sum += value;
          ++values;
        }
      }
    }
  }
  EXPECT(different > values * 0.99);
  EXPECT(std::abs(sum / values) < 0.02);
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
