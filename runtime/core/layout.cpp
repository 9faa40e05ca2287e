#include "layout.h"

#include <unistd.h>

#include <algorithm>

namespace edge_qkv {

int64_t CacheLayout::token_bytes() const {
  int64_t bytes = 0;
  for (const CacheTensor& tensor : tensors) {
    bytes += static_cast<int64_t>(row_bytes(tensor)) * tensor.kv_heads;
  }
  return bytes;
}

std::vector<Slab> CacheLayout::slabs() const {
  std::vector<Slab> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int64_t head = 0; head < tensors[i].kv_heads; ++head) all.push_back({i, head});
  }
  return all;
}

std::string part_name(const CacheTensor& tensor) {
  constexpr const char* kNames[] = {"kv", "key", "value"};  // Part
  return std::string(kNames[static_cast<int>(tensor.part)]) + (tensor.scales ? "_scale" : "");
}

namespace {

// The last `rows` of `length` and the sinks.
LiveRows last_rows(const CacheTensor& tensor, int64_t length, int64_t rows) {
  const int64_t first = tensor.window == 0 ? 0 : std::max<int64_t>(0, length - rows);
  if (first <= tensor.sinks) return {0, 0, length};
  return {tensor.sinks, first, length};
}

// Of `length` tokens: more than all are not kept.
int64_t margin_of(const CacheTensor& tensor, int64_t margin, int64_t length) {
  return margin == 0 ? tensor.window : std::min(margin, length);
}

}  // namespace

LiveRows live_rows(const CacheTensor& tensor, int64_t length, int64_t margin) {
  return last_rows(tensor, length, tensor.window + margin_of(tensor, margin, length));
}

LiveRows visible_rows(const CacheTensor& tensor, int64_t length) {
  return last_rows(tensor, length, tensor.window - 1);
}

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t to_whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

size_t resident_bytes(const CacheLayout& layout, int64_t length, int64_t margin, int64_t chunk) {
  size_t sum = 0;
  for (const CacheTensor& tensor : layout.tensors) {
    const auto bytes = [&](int64_t rows) {
      return layout.row_bytes(tensor) * static_cast<size_t>(rows);
    };
    size_t slab = to_whole_pages(bytes(length));
    const int64_t live = tensor.window + margin_of(tensor, margin, length) + chunk;
    if (tensor.window > 0 && tensor.sinks + live < length) {
      const size_t pages =
          to_whole_pages(bytes(tensor.sinks)) + to_whole_pages(bytes(live)) + page_bytes();
      slab = std::min(slab, pages);
    }
    sum += slab * static_cast<size_t>(tensor.kv_heads);
  }
  return sum;
}

}  // namespace edge_qkv
