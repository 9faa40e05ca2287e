#include "cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "error.h"
#include "random.h"
#include "rows_file.h"

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

namespace edge_qkv {
namespace {

// What exports round fixed rows up for: no system that they are made for has larger pages.
constexpr size_t kMostPageBytes = 64 * 1024;

// More than any processor's user space addresses; keeps the sums below far from overflow.
constexpr size_t kMostBytes = size_t{1} << (sizeof(size_t) == 8 ? 47 : 31);

// What makes every slab of a layout whole pages: multiples of this many rows.
int64_t rows_of_whole_pages(const CacheLayout& layout) {
  int64_t rows = 1;
  for (int64_t tensor = 0; tensor < layout.tensors_per_layer(); ++tensor) {
    const int64_t page = static_cast<int64_t>(page_bytes());
    const int64_t step = page / std::gcd(page, static_cast<int64_t>(layout.row_bytes(tensor)));
    rows = std::max(rows, step);  // all are powers of two
  }
  return rows;
}

void check_fixed_rows(const CacheLayout& layout, int64_t context, int64_t rows) {
  if (rows < context) {
    throw Error(EQKV_BAD_PACKAGE, "The model file has caches of " + std::to_string(rows) +
                                      " rows, too few for a context of " + std::to_string(context) +
                                      " tokens; export the model again.");
  }
  if (const int64_t step = rows_of_whole_pages(layout); rows % step != 0) {
    const int64_t missing = step / std::gcd(step, rows);  // a power of two
    throw Error(
        EQKV_BAD_PACKAGE,
        "The model was exported for memory pages of at most " +
            std::to_string(page_bytes() / static_cast<size_t>(missing)) +
            " bytes, this system has pages of " + std::to_string(page_bytes()) +
            (page_bytes() > kMostPageBytes ? "; files with a fixed number of rows do not support such "
                                             "systems, export the model for ONNX Runtime."
                                           : "; export the model again."));
  }
}

}  // namespace

CacheMemory::CacheMemory(const CacheLayout& layout, int64_t context, int64_t rows) {
  const auto refuse = [&](const std::string& why) {
    throw Error(EQKV_OUT_OF_MEMORY,
                "A cache of " + std::to_string(rows > 0 ? rows : context) + " tokens " + why +
                    (rows > 0 ? "; export the model for a smaller context (--capacity)."
                              : "; open the session with a smaller context."));
  };
  if (rows > 0) check_fixed_rows(layout, context, rows);
  view_.layout = layout;
  view_.capacity = rows > 0 ? rows : context;
  // No sum or product below can overflow once this one does not.
  const int64_t step = rows_of_whole_pages(layout);
  size_t bytes = 8;  // more than a value and its share of a scale
  const size_t rounded = static_cast<size_t>(view_.capacity) + static_cast<size_t>(step);
  for (const size_t count : {static_cast<size_t>(layout.tensors()), static_cast<size_t>(layout.kv_heads),
                             rounded, static_cast<size_t>(layout.head_dim)}) {
    if (__builtin_mul_overflow(bytes, count, &bytes) || bytes > kMostBytes) {
      refuse("is larger than the address space");
    }
  }
  view_.capacity = (view_.capacity + step - 1) / step * step;
  reserved_ = view_.bytes();

  view_.tensors.reserve(static_cast<size_t>(layout.tensors()));
  void* base = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    refuse("needs " + std::to_string(reserved_) + " bytes, which the system does not give");
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
  constexpr size_t kPages = 4096;
  constexpr uint64_t kPresent = uint64_t{1} << 63;
  const File pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  uint64_t entries[kPages];  // of the pagemap: one a page
#if defined(__APPLE__)
  char pages[kPages];
#else
  unsigned char pages[kPages];
#endif
  size_t committed = 0;
  for (size_t at = 0; at < reserved_; at += kPages * page_bytes()) {
    const size_t bytes = std::min(kPages * page_bytes(), reserved_ - at);
    const size_t count = bytes / page_bytes();
    const uint64_t first = reinterpret_cast<uintptr_t>(base_ + at) / page_bytes();
    if (pagemap && read_all(pagemap, entries, count * sizeof *entries, first * sizeof *entries)) {
      committed +=
          page_bytes() * static_cast<size_t>(std::count_if(entries, entries + count,
                                                           [](uint64_t e) { return e & kPresent; }));
    } else if (mincore(base_ + at, bytes, pages) == 0) {
      committed += page_bytes() * static_cast<size_t>(std::count_if(
                                      pages, pages + count, [](unsigned char p) { return p & 1; }));
    } else {
      throw Error(EQKV_INVALID_ARGUMENT,
                  "This system does not report which pages of the cache are in RAM.");
    }
  }
  return committed;
}

void CacheMemory::release(int64_t length) {
  changed_from(length);
  for (int64_t slab = 0; slab < view_.layout.slabs(); ++slab) {
    // Only a saving: where the system declines, the rows stay in RAM. Pages of a mapped file stay
    // mapped; the rows in them are as undefined as any others.
    const size_t begin = to_whole_pages(slab_row_bytes(slab) * static_cast<size_t>(length));
    const size_t end = slab_row_bytes(slab) * static_cast<size_t>(view_.capacity);
    if (begin < end) madvise(view_.slab(slab) + begin, end - begin, MADV_DONTNEED);
  }
}

void CacheMemory::changed_from(int64_t row) { in_file_ = std::min(in_file_, row); }

void CacheMemory::spill(const std::string& directory, int64_t length) {
  if (length == 0) return release(0);
  // A file in memory gives no memory back. One that another cache or process maps, or a snapshot, must
  // not change; and more rows go where they are asked to go: the directory of the file may be full.
  const auto usable_as_it_is = [&] { return !file_->in_memory || directory.empty(); };
  const auto writable = [&] {
    return file_->temporary && file_.use_count() == 1 && file_->forks == forks() &&
           file_->in_memory == directory.empty();
  };
  const bool usable = file_ && (in_file_ >= length ? usable_as_it_is() : writable());
  const std::shared_ptr<const RowsFile> file = usable ? file_ : make_rows_file(directory, view_);
  const int64_t first = usable ? std::min(in_file_, length) : 0;
  // Slab by slab: while one is in RAM twice the ones before it are not in RAM at all. A page that is
  // written again and still mapped from the same file gets the bytes that it has: after an error
  // half-way every row reads as before, and rows [0, in_file_) of file_ are still what they were.
  for (int64_t slab = 0; slab < view_.layout.slabs(); ++slab) {
    const size_t row = slab_row_bytes(slab);
    const size_t begin = row * static_cast<size_t>(first) / page_bytes() * page_bytes();
    const size_t end = to_whole_pages(row * static_cast<size_t>(length));
    if (first < length && !write_all(file->file, view_.slab(slab) + begin, end - begin,
                                     file->slabs[static_cast<size_t>(slab)] + begin)) {
      throw Error(EQKV_OUT_OF_MEMORY, "The cache cannot be moved to a file in " + file->place + ": " +
                                          std::strerror(errno) +
                                          "; free space there, or name another directory.");
    }
    if (!map_slab(*file, slab, length)) {
      throw Error(EQKV_OUT_OF_MEMORY, "A cache cannot be mapped from a file in " + file->place + ": " +
                                          std::strerror(errno) + "; name another directory.");
    }
  }
  file_ = file;
  in_file_ = length;
  release(length);  // what an evaluation that failed left behind the rows
}

void CacheMemory::map(std::shared_ptr<const RowsFile> file, int64_t length) {
  release(0);
  if (length == 0) return;
  bool mapped = true;
  for (int64_t slab = 0; slab < view_.layout.slabs(); ++slab) {
    mapped = mapped && map_slab(*file, slab, length);
    if (!mapped &&
        !read_all(file->file, view_.slab(slab), slab_row_bytes(slab) * static_cast<size_t>(length),
                  file->slabs[static_cast<size_t>(slab)])) {
      throw Error(EQKV_OUT_OF_MEMORY, "The rows in " + file->place + " cannot be read: " +
                                          (errno ? std::strerror(errno) : "the file ends too early") +
                                          ".");
    }
  }
  file_ = mapped ? std::move(file) : nullptr;
  in_file_ = mapped ? length : 0;
}

// Linux checks all that depends on the file and on the number of mappings before it unmaps what lay
// there: where this fails the rows are still in their place.
bool CacheMemory::map_slab(const RowsFile& file, int64_t slab, int64_t length) {
  // What lies behind the rows in a file of our own is as undefined as what lies behind them here.
  const int64_t rows = file.capacity == view_.capacity ? view_.capacity : length;
  const size_t bytes = to_whole_pages(slab_row_bytes(slab) * static_cast<size_t>(rows));
  const uint64_t offset = file.slabs[static_cast<size_t>(slab)];
  errno = EINVAL;  // what mmap says of a part of a page
  return offset % page_bytes() == 0 &&
         mmap(view_.slab(slab), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
              file.file.get(), static_cast<off_t>(offset)) != MAP_FAILED;
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
