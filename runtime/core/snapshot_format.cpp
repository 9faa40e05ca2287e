#include "snapshot_format.h"

#include <cstring>

#include "checksum.h"
#include "error.h"

namespace edge_qkv::snapshot_format {
namespace {

// Of a slab of `tokens` rows, what lies between the sinks and the first live row, but for the parts of
// pages at either end.
ByteGap gap_between(uint64_t row_bytes, uint64_t sinks, uint64_t first_live, uint64_t alignment) {
  const uint64_t begin = (sinks * row_bytes + alignment - 1) & ~(alignment - 1);
  const uint64_t end = (first_live * row_bytes) & ~(alignment - 1);
  return begin < end ? ByteGap{begin, end} : ByteGap{};
}

}  // namespace

uint64_t checksum_of(const void* data, size_t bytes) {
  Checksum sum;
  sum.add(data, bytes);
  return sum.value();
}

uint64_t header_checksum(const Header& header) {
  return checksum_of(&header, offsetof(Header, header_checksum));
}

bool find_places(const CacheLayout& layout, const std::vector<int64_t>& first_live, uint64_t tokens,
                 uint64_t vocab_size, bool has_logits, uint64_t alignment, Places* places) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  const auto add = [](uint64_t count, uint64_t bytes, uint64_t* at) {
    return !__builtin_mul_overflow(count, bytes, &bytes) && !__builtin_add_overflow(*at, bytes, at) &&
           *at <= kMost;
  };
  const auto align = [&](uint64_t at) { return (at + alignment - 1) & ~(alignment - 1); };
  uint64_t at = sizeof(Header) + layout.tensors.size() * sizeof(TableLine);
  places->tokens = at;
  if (!add(tokens, sizeof(int32_t), &at)) return false;
  places->logits = at;
  if (has_logits && !add(vocab_size, sizeof(float), &at)) return false;
  places->rows = at = align(at);
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const CacheTensor& tensor = layout.tensors[i];
    const uint64_t row = layout.row_bytes(tensor);
    uint64_t bytes = 0;
    if (!add(tokens, row, &bytes)) return false;
    // A first live row comes after the sinks and before `tokens`: neither product overflows.
    const ByteGap gap = first_live[i] == 0
                            ? ByteGap{}
                            : gap_between(row, static_cast<uint64_t>(tensor.sinks),
                                          static_cast<uint64_t>(first_live[i]), alignment);
    places->gaps.push_back(gap);
    for (int64_t head = 0; head < tensor.kv_heads; ++head) {
      places->slabs.push_back(at);
      if (!add(1, bytes - (gap.end - gap.begin), &at)) return false;
      at = align(at);
    }
  }
  places->end = at;
  return true;
}

std::vector<TableLine> table_of(const CacheLayout& layout, const std::vector<int64_t>& first_live) {
  std::vector<TableLine> table;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const CacheTensor& tensor = layout.tensors[i];
    table.push_back({static_cast<uint32_t>(tensor.layer), static_cast<uint32_t>(tensor.part),
                     tensor.scales ? 1u : 0u, static_cast<uint32_t>(tensor.kv_heads),
                     static_cast<uint64_t>(tensor.scales ? 1 : tensor.dim),
                     static_cast<uint64_t>(tensor.window), static_cast<uint64_t>(tensor.sinks),
                     static_cast<uint64_t>(first_live[i])});
  }
  return table;
}

Header make_header(const ModelInfo& model) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.byte_order = kByteOrder;
  header.version = kVersion;
  header.vocab_size = static_cast<uint64_t>(model.description.vocab_size);
  header.cache_type = static_cast<uint32_t>(model.layout.type);
  header.tensors = model.layout.tensors.size();
  if (model.fingerprint.size() != kFingerprint) {
    throw Error(EQKV_BAD_PACKAGE, "The model has no fingerprint, by which snapshots know it.");
  }
  std::memcpy(header.fingerprint, model.fingerprint.data(), kFingerprint);
  return header;
}

}  // namespace edge_qkv::snapshot_format
