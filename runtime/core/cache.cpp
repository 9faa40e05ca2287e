#include "cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "error.h"
#include "random.h"

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

namespace edge_qkv {
namespace {

// More than any processor's user space addresses; keeps the sums below far from overflow.
constexpr size_t kMostBytes = size_t{1} << (sizeof(size_t) == 8 ? 47 : 31);

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t to_whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

[[noreturn]] void refuse(int64_t capacity, const std::string& why) {
  throw Error(EQKV_OUT_OF_MEMORY, "A cache for a context of " + std::to_string(capacity) + " tokens " +
                                      why + "; open the session with a smaller context.");
}

}  // namespace

CacheMemory::CacheMemory(CacheType type, int64_t tensors, int64_t kv_heads, int64_t capacity,
                         int64_t head_dim) {
  view_.type = type;
  view_.kv_heads = kv_heads;
  view_.capacity = capacity;
  view_.head_dim = head_dim;
  size_t bytes = view_.element_bytes();
  for (const int64_t count : {tensors, kv_heads, capacity, head_dim}) {
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(count), &bytes) || bytes > kMostBytes) {
      refuse(capacity, "is larger than the address space");
    }
  }
  // Each tensor starts on a page, so that an engine sees it well aligned.
  const size_t stride = to_whole_pages(view_.tensor_bytes());
  if (__builtin_mul_overflow(stride, static_cast<size_t>(tensors), &reserved_) ||
      reserved_ > kMostBytes) {
    refuse(capacity, "is larger than the address space");
  }
  view_.tensors.reserve(static_cast<size_t>(tensors));
  void* base = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    refuse(capacity, "needs " + std::to_string(reserved_) + " bytes, which the system does not give");
  }
  base_ = static_cast<std::byte*>(base);
#if defined(MADV_NOHUGEPAGE)
  // A huge page would commit 2 MiB of each tensor with its first row.
  madvise(base_, reserved_, MADV_NOHUGEPAGE);
#endif
  for (int64_t i = 0; i < tensors; ++i) view_.tensors.push_back(base_ + static_cast<size_t>(i) * stride);
}

CacheMemory::~CacheMemory() { munmap(base_, reserved_); }

size_t CacheMemory::committed_bytes() const {
#if defined(__APPLE__)
  char pages[4096];
#else
  unsigned char pages[4096];
#endif
  size_t committed = 0;
  for (size_t at = 0; at < reserved_; at += sizeof pages * page_bytes()) {
    const size_t bytes = std::min(sizeof pages * page_bytes(), reserved_ - at);
    if (mincore(base_ + at, bytes, pages) != 0) {
      throw Error(EQKV_INVALID_ARGUMENT,
                  "This system does not report which pages of the cache are in RAM.");
    }
    committed +=
        page_bytes() * static_cast<size_t>(std::count_if(pages, pages + bytes / page_bytes(),
                                                         [](unsigned char p) { return p & 1; }));
  }
  return committed;
}

void CacheMemory::release(int64_t length) {
  const size_t stride = to_whole_pages(view_.tensor_bytes());
  for (size_t tensor = 0; tensor < view_.tensors.size(); ++tensor) {
    for (int64_t head = 0; head < view_.kv_heads; ++head) {
      const std::byte* first = view_.row(tensor, head, length);
      // Nothing follows the last head on its last page.
      const std::byte* last =
          head + 1 < view_.kv_heads ? view_.row(tensor, head + 1, 0) : view_.tensors[tensor] + stride;
      const size_t begin = to_whole_pages(static_cast<size_t>(first - base_));
      const size_t end = static_cast<size_t>(last - base_) / page_bytes() * page_bytes();
      // Only a saving: where the system declines, the rows stay in RAM.
      if (begin < end) madvise(base_ + begin, end - begin, MADV_DONTNEED);
    }
  }
}

void fill_with_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed) {
  const size_t values = static_cast<size_t>(view.head_dim);
  for (size_t tensor = 0; tensor < view.tensors.size(); ++tensor) {
    for (int64_t head = 0; head < view.kv_heads; ++head) {
      const uint64_t head_key =
          scramble(scramble(seed ^ scramble(tensor)) ^ static_cast<uint64_t>(head));
      for (int64_t row = begin; row < end; ++row) {
        std::byte* out = view.row(tensor, head, row);
        const uint64_t row_key = scramble(head_key ^ static_cast<uint64_t>(row));
        uint64_t bits = 0;
        for (size_t i = 0; i < values; ++i, bits >>= 16) {
          if (i % 4 == 0) bits = scramble(row_key + i);
          // 12 of 16 bits: a sign, one bit of exponent (2^-1 or 2^-2), ten of mantissa, which both types
          // hold exactly.
          const uint32_t sign = bits >> 15 & 1, exponent = bits >> 14 & 1, mantissa = bits & 0x3ff;
          if (view.type == CacheType::kFloat16) {
            const uint16_t half = static_cast<uint16_t>(sign << 15 | (13 + exponent) << 10 | mantissa);
            std::memcpy(out + i * sizeof half, &half, sizeof half);
          } else {
            const uint32_t single = sign << 31 | (125 + exponent) << 23 | mantissa << 13;
            std::memcpy(out + i * sizeof single, &single, sizeof single);
          }
        }
      }
    }
  }
}

}  // namespace edge_qkv
