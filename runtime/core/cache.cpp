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

size_t to_page_start(size_t bytes) { return bytes / page_bytes() * page_bytes(); }

// What makes every slab of a layout whole pages: multiples of this many rows.
int64_t rows_of_whole_pages(const CacheLayout& layout) {
  int64_t rows = 1;
  for (const CacheTensor& tensor : layout.tensors) {
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

CacheMemory::CacheMemory(const CacheLayout& layout, int64_t context, int64_t rows, int64_t margin)
    : slabs_(layout.slabs()), margin_(margin), first_live_(layout.tensors.size()) {
  const auto refuse = [&](const std::string& why) {
    throw Error(EQKV_OUT_OF_MEMORY,
                "A cache of " + std::to_string(rows > 0 ? rows : context) + " tokens " + why +
                    (rows > 0 ? "; export the model for a smaller context (--capacity)."
                              : "; open the session with a smaller context."));
  };
  if (rows > 0) check_fixed_rows(layout, context, rows);
  view_.layout = layout;
  view_.capacity = rows > 0 ? rows : context;
  // No sum or product elsewhere can overflow once these do not.
  const int64_t step = rows_of_whole_pages(layout);
  const size_t rounded = static_cast<size_t>(view_.capacity) + static_cast<size_t>(step);
  size_t sum = 0;
  for (const CacheTensor& tensor : layout.tensors) {
    size_t bytes = layout.row_bytes(tensor);
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(tensor.kv_heads), &bytes) ||
        __builtin_mul_overflow(bytes, rounded, &bytes) || __builtin_add_overflow(sum, bytes, &sum) ||
        sum > kMostBytes) {
      refuse("is larger than the address space");
    }
  }
  view_.capacity = (view_.capacity + step - 1) / step * step;
  reserved_ = view_.bytes();

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
  for (size_t tensor = 0; tensor < layout.tensors.size(); at += view_.tensor_bytes(tensor++)) {
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

void CacheMemory::grow_to(int64_t length) {
  for (size_t i = 0; i < first_live_.size(); ++i) {
    const CacheTensor& tensor = view_.layout.tensors[i];
    const int64_t before = first_live_[i], first = live_rows(tensor, length, margin_).first;
    if (first <= before) continue;
    first_live_[i] = first;
    // Pages before the one that held the first live row are gone already.
    const size_t sinks = to_whole_pages(row_bytes(i) * static_cast<size_t>(tensor.sinks));
    const size_t begin = std::max(sinks, to_page_start(row_bytes(i) * static_cast<size_t>(before)));
    const size_t end = to_page_start(row_bytes(i) * static_cast<size_t>(first));
    for (int64_t head = 0; begin < end && head < tensor.kv_heads; ++head) {
      madvise(view_.row({i, head}, 0) + begin, end - begin, MADV_DONTNEED);  // only a saving
    }
  }
}

std::vector<RowSpan> CacheMemory::live(size_t tensor, int64_t begin, int64_t end) const {
  const int64_t first = first_live_[tensor];
  const int64_t sinks = first == 0 ? end : std::min(view_.layout.tensors[tensor].sinks, end);
  std::vector<RowSpan> ranges;
  if (begin < sinks) ranges.push_back({begin, sinks});
  if (std::max({begin, first, sinks}) < end) ranges.push_back({std::max({begin, first, sinks}), end});
  return ranges;
}

uint64_t CacheMemory::live_bytes(int64_t length) const {
  uint64_t bytes = 0;
  for (const Slab& slab : slabs_) {
    for (const RowSpan& rows : live(slab.tensor, 0, length)) {
      bytes += row_bytes(slab.tensor) * static_cast<uint64_t>(rows.end - rows.begin);
    }
  }
  return bytes;
}

bool CacheMemory::holds_visible(int64_t length) const {
  for (size_t i = 0; i < first_live_.size(); ++i) {
    const CacheTensor& tensor = view_.layout.tensors[i];
    if (length <= tensor.sinks) continue;
    const int64_t first = visible_rows(tensor, length).first;
    if (first < length && first < first_live_[i]) return false;
  }
  return true;
}

void CacheMemory::set_first_live(size_t tensor, int64_t first) {
  first_live_[tensor] = first <= view_.layout.tensors[tensor].sinks ? 0 : first;
}

void CacheMemory::release(int64_t length) {
  changed_from(length);
  for (size_t i = 0; i < first_live_.size(); ++i) set_first_live(i, std::min(first_live_[i], length));
  for (const Slab& slab : slabs_) {
    // Only a saving: where the system declines, the rows stay in RAM. Pages of a mapped file stay
    // mapped; the rows in them are as undefined as any others.
    const size_t begin = to_whole_pages(row_bytes(slab.tensor) * static_cast<size_t>(length));
    const size_t end = view_.slab_bytes(slab.tensor);
    if (begin < end) madvise(view_.row(slab, 0) + begin, end - begin, MADV_DONTNEED);
  }
}

void CacheMemory::changed_from(int64_t row) { in_file_ = std::min(in_file_, row); }

// Rows [0, sinks) of those that were sinks are still in
// front; the others have moved up with all the rest.
LiveRows CacheMemory::after_drop(size_t tensor, int64_t first, int64_t last, int64_t length) const {
  const int64_t live = first_live_[tensor], sinks = view_.layout.tensors[tensor].sinks;
  const int64_t dropped = last - first;
  if (live == 0) return {0, 0, length - dropped};
  return {last < sinks ? sinks - dropped : std::min(sinks, first),
          live <= first ? live : std::max(first, live - dropped), length - dropped};
}

bool CacheMemory::drops(int64_t first, int64_t last, int64_t length) const {
  for (size_t i = 0; i < first_live_.size(); ++i) {
    const CacheTensor& tensor = view_.layout.tensors[i];
    const LiveRows after = after_drop(i, first, last, length);
    if (after.first <= after.sinks) continue;
    const LiveRows visible = visible_rows(tensor, after.length);
    if (after.sinks < tensor.sinks || visible.first < after.first) return false;
  }
  return true;
}

void CacheMemory::drop(int64_t first, int64_t last, int64_t length) {
  for (size_t i = 0; i < first_live_.size(); ++i) {
    const LiveRows after = after_drop(i, first, last, length);
    set_first_live(i, after.first <= after.sinks ? 0 : after.first);
  }
  changed_from(first);
  release(length - (last - first));
}

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
  const bool ours = usable && writable();
  const std::shared_ptr<const RowsFile> file = usable ? file_ : make_rows_file(directory, view_);
  const int64_t first = usable ? std::min(in_file_, length) : 0;
  // Slab by slab: while one is in RAM twice the ones before it are not in RAM at all. A page that is
  // written again and still mapped from the same file gets the bytes that it has: after an error
  // half-way every row reads as before, and what the file holds of rows [0, in_file_) is still there.
  for (size_t i = 0; i < slabs_.size(); ++i) {
    for (const RowSpan& rows : live(slabs_[i].tensor, first, length)) {
      const size_t row = row_bytes(slabs_[i].tensor);
      const size_t begin = to_page_start(row * static_cast<size_t>(rows.begin));
      const size_t end = to_whole_pages(row * static_cast<size_t>(rows.end));
      if (write_all(file->file, view_.row(slabs_[i], 0) + begin, end - begin, file->slabs[i] + begin)) {
        continue;
      }
      throw Error(EQKV_OUT_OF_MEMORY, "The cache cannot be moved to a file in " + file->place + ": " +
                                          std::strerror(errno) +
                                          "; free space there, or name another directory.");
    }
    if (!map_slab(*file, i, length)) {
      throw Error(EQKV_OUT_OF_MEMORY, "A cache cannot be mapped from a file in " + file->place + ": " +
                                          std::strerror(errno) + "; name another directory.");
    }
  }
  file_ = file;
  in_file_ = length;
  release(length);  // what an evaluation that failed left behind the rows
  if (ours) drop_from_file();
}

// The file would grow to the whole context otherwise. Only a saving.
void CacheMemory::drop_from_file() const {
#if defined(FALLOC_FL_PUNCH_HOLE)
  for (size_t i = 0; i < slabs_.size(); ++i) {
    const size_t tensor = slabs_[i].tensor, row = row_bytes(tensor);
    const size_t begin = to_whole_pages(row * static_cast<size_t>(view_.layout.tensors[tensor].sinks));
    const size_t end = to_page_start(row * static_cast<size_t>(first_live_[tensor]));
    if (begin >= end) continue;
    fallocate(file_->file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(file_->slabs[i] + begin), static_cast<off_t>(end - begin));
  }
#endif
}

void CacheMemory::map(std::shared_ptr<const RowsFile> file, int64_t length,
                      const std::vector<int64_t>& first_live) {
  release(0);
  if (length == 0) return;
  for (size_t i = 0; i < first_live_.size(); ++i) set_first_live(i, first_live[i]);
  const auto read = [&](size_t slab) {
    const size_t tensor = slabs_[slab].tensor, row = row_bytes(tensor);
    for (const RowSpan& rows : live(tensor, 0, length)) {
      if (!read_all(file->file, view_.row(slabs_[slab], rows.begin),
                    row * static_cast<size_t>(rows.end - rows.begin),
                    file->offset(slab, tensor, row * static_cast<size_t>(rows.begin)))) {
        return false;
      }
    }
    return true;
  };
  bool mapped = true;
  for (size_t slab = 0; slab < slabs_.size(); ++slab) {
    mapped = mapped && map_slab(*file, slab, length);
    if (mapped || read(slab)) continue;
    const std::string why = errno ? std::strerror(errno) : "the file ends too early";
    release(0);
    throw Error(EQKV_OUT_OF_MEMORY, "The rows in " + file->place + " cannot be read: " + why + ".");
  }
  file_ = mapped ? std::move(file) : nullptr;
  in_file_ = mapped ? length : 0;
}

// Linux checks all that depends on the file and on the number of mappings before it unmaps what lay
// there: where this fails the rows are still in their place.
bool CacheMemory::map_slab(const RowsFile& file, size_t slab, int64_t length) {
  const size_t tensor = slabs_[slab].tensor;
  // What lies behind the rows in a file of our own is as undefined as what lies behind them here.
  const int64_t rows = file.capacity == view_.capacity ? view_.capacity : length;
  const auto map = [&](size_t begin, size_t end) {
    const uint64_t offset = file.offset(slab, tensor, begin);
    errno = EINVAL;  // what mmap says of a part of a page
    return begin >= end || (begin % page_bytes() == 0 && offset % page_bytes() == 0 &&
                            mmap(view_.row(slabs_[slab], 0) + begin, end - begin, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file.file.get(),
                                 static_cast<off_t>(offset)) != MAP_FAILED);
  };
  const ByteGap gap = file.gap(tensor);
  return map(0, gap.begin) &&
         map(gap.end, to_whole_pages(row_bytes(tensor) * static_cast<size_t>(rows)));
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
  for (size_t tensor = 0; tensor < view.tensors.size(); ++tensor) {
    fill_with_noise(view, tensor, begin, end, seed);
  }
}

void fill_with_noise(const CacheView& view, size_t tensor, int64_t begin, int64_t end, uint64_t seed) {
  const CacheTensor& shape = view.layout.tensors[tensor];
  // Values of int8 rows are up to 1: one scale, the fp16 next to 1/127, serves them all.
  constexpr uint16_t kScale = 0x2008;
  constexpr float kScaleValue = 0x1.02p-7f;
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    const uint64_t head_key =
        scramble(scramble(seed ^ scramble(static_cast<uint64_t>(tensor))) ^ static_cast<uint64_t>(head));
    for (int64_t row = begin; row < end; ++row) {
      std::byte* out = view.row({tensor, head}, row);
      if (shape.scales) {
        std::memcpy(out, &kScale, sizeof kScale);
        continue;
      }
      const uint64_t row_key = scramble(head_key ^ static_cast<uint64_t>(row));
      for (size_t i = 0; i < static_cast<size_t>(shape.dim); ++i) {
        const float value = noise(row_key, i);
        uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        // A float of this range is a half with other widths of exponent and mantissa.
        const uint16_t half =
            static_cast<uint16_t>(bits >> 16 & 0x8000) |
            static_cast<uint16_t>(((bits >> 23 & 0xff) - 112) << 10 | (bits >> 13 & 0x3ff));
        const int8_t code = static_cast<int8_t>(std::lround(value / kScaleValue));
        switch (view.layout.type) {
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

}  // namespace edge_qkv
