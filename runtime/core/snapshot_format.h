// A snapshot's header, its table of tensors and where all else lies: what snapshot.md describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine.h"
#include "layout.h"
#include "rows_file.h"

namespace edge_qkv::snapshot_format {

inline constexpr char kMagic[] = "EQKVSNAP";
inline constexpr uint32_t kByteOrder = 0x01020304, kSwapped = 0x04030201, kVersion = 2;
inline constexpr uint32_t kHasLogits = 1;
inline constexpr uint64_t kLeastAlignment = 64, kMostAlignment = uint64_t{1} << 20;
inline constexpr size_t kFingerprint = 64;
inline constexpr int64_t kMostTokens = int64_t{1} << 48;  // far above any context

struct Header {
  char magic[8];
  uint32_t byte_order, version;
  uint64_t file_bytes, alignment, tokens, vocab_size;
  uint32_t cache_type, flags;
  uint64_t tensors;
  char fingerprint[kFingerprint];
  uint64_t tokens_offset, logits_offset, rows_offset, table_checksum;
  unsigned char reserved[80];
  uint64_t content_checksum, header_checksum;
};
static_assert(sizeof(Header) == 256 && offsetof(Header, header_checksum) == 248, "as in snapshot.md");

// A line of the table of tensors.
struct TableLine {
  uint32_t layer, part, scales, kv_heads;
  uint64_t dim, window, sinks, first_live;
};
static_assert(sizeof(TableLine) == 48, "as in snapshot.md");

uint64_t checksum_of(const void* data, size_t bytes);
uint64_t header_checksum(const Header& header);

// Where everything lies in a snapshot.
struct Places {
  uint64_t tokens = 0, logits = 0, rows = 0, end = 0;
  std::vector<uint64_t> slabs;  // as in layout.slabs()
  std::vector<ByteGap> gaps;    // as in layout.tensors
};

// False where a number overflows. What the layout says of a row does not.
bool find_places(const CacheLayout& layout, const std::vector<int64_t>& first_live, uint64_t tokens,
                 uint64_t vocab_size, bool has_logits, uint64_t alignment, Places* places);

std::vector<TableLine> table_of(const CacheLayout& layout, const std::vector<int64_t>& first_live);

// With all that follows from the model; the rest is 0. Throws Error where it has no fingerprint.
Header make_header(const ModelInfo& model);

}  // namespace edge_qkv::snapshot_format
