// What a model file says of its model, in one text: the facts that the runtime works with. The text
// comes from outside: nothing in it is believed unchecked.
//
// At most 64 KiB of ASCII: lines "name value", each ended by a newline, whose names have letters a to z
// and underscores. First what all layers share, then for each kind of layer "kind NAME" (a word) and
// what is true of it, at last the kind of each layer. Names that are not known are somebody else's; all
// of these are needed:
//
//   format 3
//   vocab_size, max_positions, width     integers, as all below without values of their own
//   cache                                fp32, fp16 or int8
//   learned_positions                    0 or 1
//   weight_bits                          4, 8, 16 or 32
//   block_size, matrix_bytes, table_bytes, prefill_chunk, cache_rows
//   operator 2
//   kind NAME
//   heads, kv_heads, head_dim, value_dim
//   rows                                 unified, separate or "of NAME"
//   window, sinks
//   positions                            none, rotary-conjugate or rotary-on-read
//   rotary_offset
//   frequencies                          decimal numbers; none, or no line, without rotary positions
//   mlp_width, mlp_matrices
//   pattern NAME NAME ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "edge_qkv.h"
#include "layout.h"

namespace edge_qkv {

// How a cached row depends on the position it was written at, besides learned positions.
enum class Positions : int {
  kNone = 0,             // not at all
  kRotaryConjugate = 1,  // rotated when written: to move, it is rotated further
  kRotaryOnRead = 2,     // stored raw
};

enum class Rows : int {
  kUnified = 0,   // one row is key and value
  kSeparate = 1,  // a row of keys and one of values
  kOther = 2,     // none of its own: reads those of an earlier layer
};

struct LayerKind {
  std::string name;
  int64_t heads = 0;      // H
  int64_t kv_heads = 0;   // G
  int64_t head_dim = 0;   // D: of a key
  int64_t value_dim = 0;  // V
  Rows rows = Rows::kUnified;
  size_t rows_of = 0;             // kOther: the kind whose last earlier layer has the rows
  int64_t window = 0, sinks = 0;  // see attention/attention.h
  Positions positions = Positions::kNone;
  int64_t rotary_offset = 0;        // O
  std::vector<double> frequencies;  // [R/2], radians a position; empty without rotation
  int64_t mlp_width = 0;
  int64_t mlp_matrices = 2;  // 2, or 3 with a gate
};

// Of one forward.
constexpr int64_t kMostChunk = 1 << 20;

struct Description {
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t width = 0;
  CacheType cache = CacheType::kFloat16;
  bool learned_positions = false;  // through the embedding: no row can move
  int weight_bits = 32;            // of the matrices in the layers: 4, 8, 16 or 32
  int block_size = 0;              // weights that share a scale; 0 where there is none, or one for a row
  uint64_t matrix_bytes = 0;       // matrices that are multiplied by
  uint64_t table_bytes = 0;        // all else that is stored; a tied head's weight counts in both
  int64_t prefill_chunk = 0;       // most tokens of one forward; 0: any
  int64_t cache_rows = 0;          // of every cache tensor, fixed by the file; 0: as a session asks
  std::vector<LayerKind> kinds;
  std::vector<size_t> pattern;  // of each layer: its kind

  const LayerKind& layer(size_t i) const { return kinds[pattern[i]]; }
  int64_t layers() const { return static_cast<int64_t>(pattern.size()); }
};

// Reads `text`. Throws Error with `status`; its sentence begins with `source`, the file.
Description read_description(const std::string& text, const std::string& source,
                             eqkv_status status = EQKV_BAD_PACKAGE);

// For each layer the one whose rows it reads: itself, where it has its own.
std::vector<size_t> rows_from(const Description& description);

// The tensors that a session has for the model.
CacheLayout cache_layout(const Description& description);

}  // namespace edge_qkv
