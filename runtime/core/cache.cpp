#include "cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
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

[[noreturn]] void refuse(int64_t context, const std::string& why) {
  throw Error(EQKV_OUT_OF_MEMORY, "A cache for a context of " + std::to_string(context) + " tokens " +
                                      why + "; open the session with a smaller context.");
}

}  // namespace

CacheMemory::CacheMemory(const CacheLayout& layout, int64_t context) {
  view_.layout = layout;
  view_.capacity = context;
  // No sum or product below can overflow once this one does not.
  size_t bytes = 8 * page_bytes();
  for (const int64_t count : {layout.tensors(), layout.kv_heads, context, layout.head_dim}) {
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(count), &bytes) || bytes > kMostBytes) {
      refuse(context, "is larger than the address space");
    }
  }
  for (int64_t tensor = 0; tensor < layout.tensors_per_layer(); ++tensor) {
    const int64_t page = static_cast<int64_t>(page_bytes());
    const int64_t step = page / std::gcd(page, static_cast<int64_t>(layout.row_bytes(tensor)));
    view_.capacity = (view_.capacity + step - 1) / step * step;  // steps are powers of two
  }
  for (int64_t tensor = 0; tensor < layout.tensors(); ++tensor) reserved_ += view_.tensor_bytes(tensor);

  view_.tensors.reserve(static_cast<size_t>(layout.tensors()));
  void* base = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    refuse(context, "needs " + std::to_string(reserved_) + " bytes, which the system does not give");
  }
  base_ = static_cast<std::byte*>(base);
#if defined(MADV_NOHUGEPAGE)
  // A huge page would commit 2 MiB of each tensor with its first row.
  madvise(base_, reserved_, MADV_NOHUGEPAGE);
#endif
  std::byte* at = base_;
  for (int64_t tensor = 0; tensor < layout.tensors(); at += view_.tensor_bytes(tensor++)) {
    view_.tensors.push_back(at);
  }
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
  for (int64_t tensor = 0; tensor < view_.layout.tensors(); ++tensor) {
    for (int64_t head = 0; head < view_.layout.kv_heads; ++head) {
      const size_t begin = static_cast<size_t>(view_.row(tensor, head, length) - base_);
      const size_t end = static_cast<size_t>(view_.row(tensor, head, view_.capacity) - base_);
      // Only a saving: where the system declines, the rows stay in RAM.
      const size_t page = to_whole_pages(begin);
      if (page < end) madvise(base_ + page, end - page, MADV_DONTNEED);
    }
  }
}

namespace {

// Value i of a row of noise: a sign, one bit of exponent (2^-1 or 2^-2) and ten of mantissa, which
// every float type holds exactly.
float noise(uint64_t row_key, size_t i) {
  const uint64_t bits = scramble(row_key + i / 4 * 4) >> (i % 4 * 16);
  const float magnitude = static_cast<float>(1024 + (bits & 0x3ff)) / 4096;
  return (bits >> 15 & 1 ? -1.0f : 1.0f) * (bits >> 14 & 1 ? 2 * magnitude : magnitude);
}

}  // namespace

void fill_with_noise(const CacheView& view, int64_t begin, int64_t end, uint64_t seed) {
  const CacheLayout& layout = view.layout;
  const size_t values = static_cast<size_t>(layout.head_dim);
  // Values of int8 rows are up to 1: one scale, the fp16 next to 1/127, serves them all.
  constexpr uint16_t kScale = 0x2008;
  constexpr float kScaleValue = 0x1.02p-7f;
  for (int64_t tensor = 0; tensor < layout.tensors(); ++tensor) {
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      const uint64_t head_key = scramble(scramble(seed ^ scramble(static_cast<uint64_t>(tensor))) ^
                                         static_cast<uint64_t>(head));
      for (int64_t row = begin; row < end; ++row) {
        std::byte* out = view.row(tensor, head, row);
        if (layout.holds_scales(tensor)) {
          std::memcpy(out, &kScale, sizeof kScale);
          continue;
        }
        const uint64_t row_key = scramble(head_key ^ static_cast<uint64_t>(row));
        for (size_t i = 0; i < values; ++i) {
          const float value = noise(row_key, i);
          uint32_t bits = 0;
          std::memcpy(&bits, &value, sizeof bits);
          // A float of this range is a half with other widths of exponent and mantissa.
          const uint16_t half =
              static_cast<uint16_t>(bits >> 16 & 0x8000) |
              static_cast<uint16_t>(((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff));
          const int8_t code = static_cast<int8_t>(std::lround(value / kScaleValue));
          switch (layout.type) {
            case CacheType::kFloat32:
              std::memcpy(out + i * sizeof value, &value, sizeof value);
              break;
            case CacheType::kFloat16:
              std::memcpy(out + i * sizeof half, &half, sizeof half);
              break;
            case CacheType::kInt8:
              std::memcpy(out + i, &code, sizeof code);
              break;
          }
        }
      }
    }
  }
}

}  // namespace edge_qkv
