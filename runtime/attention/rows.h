// Rows on their way into a cache, out of it and through the kernel; and how query rows lie in lanes.
// Included by kernel.cpp, once per instruction set.
#pragma once

#include "kernel.h"
#include "simd.h"

namespace edge_qkv {
namespace EDGE_QKV_ISA {
namespace {

constexpr float kLog2e = 1.44269504f;
// A running maximum starts here rather than at -infinity, so that a row that has seen nothing yet gives
// weights of 0 and not infinity - infinity.
constexpr float kNoScore = -3.40282347e38f;
constexpr float kMasked = -__builtin_inff();
// Blocks of up to this many query rows use the second layout.
constexpr int kFewRows = kLanes / 4 > 2 ? kLanes / 4 : 2;

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

int round_up(int x, int step) { return (x + step - 1) / step * step; }

// ---- rows in and out ----

// Rotates 2*half values in pairs (i, i + half); `direction` -1 rotates back. `out` may be `in`.
void rotate_row(const float* in, float* out, const float* cos, const float* sin, int half,
                float direction) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Float<kLanes> a = load<kLanes>(in + i), b = load<kLanes>(in + half + i);
    const Float<kLanes> c = load<kLanes>(cos + i), s = load<kLanes>(sin + i) * direction;
    store<kLanes>(out + i, a * c - b * s);
    store<kLanes>(out + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = in[i], b = in[half + i], c = cos[i], s = sin[i] * direction;
    out[i] = a * c - b * s;
    out[half + i] = b * c + a * s;
  }
}

// The rotated part of a row alone: what else there is of it stays in `in`.
void rotate_row(const AttentionParams& p, const float* in, float* out, int64_t position,
                float direction) {
  const int half = p.rotary_dim / 2, at = p.rotary_offset;
  rotate_row(in + at, out + at, p.cos + position * half, p.sin + position * half, half, direction);
}

// Values are rows of their own.
bool separate(const AttentionParams& p) { return p.value_cache != nullptr; }

// A rotated part that does not lie in the value lies behind it.
bool output_is_rotated(const AttentionParams& p) {
  return p.rotary == Rotary::kConjugate && !separate(p) && p.rotary_offset < p.value_dim;
}

// A cache with its scales, both of all heads; `scales` is null unless it is int8. Rows of `dim` values.
struct Cache {
  void* rows;
  uint16_t* scales;
  int dim;
};
Cache key_cache(const AttentionParams& p) { return {p.key_cache, p.key_scales, p.head_dim}; }
Cache value_cache(const AttentionParams& p) { return {p.value_cache, p.value_scales, p.value_dim}; }

// Index of a row of a kv head among all rows of a cache.
int64_t cache_row(const AttentionParams& p, int64_t batch, int64_t kv_head, int64_t row) {
  return (batch * p.kv_heads + kv_head) * p.capacity + row;
}

// A row of `count` values as a cache holds it; `scale` is null unless it is int8.
void write_row(CacheType type, const float* in, void* row, uint16_t* scale, int64_t count) {
  switch (type) {
    case CacheType::kFloat32:
      memcpy(row, in, (size_t)count * sizeof *in);
      break;
    case CacheType::kFloat16:
      float_row_to_half(in, (uint16_t*)row, count);
      break;
    case CacheType::kInt8:
      *scale = float_row_to_codes(in, (int8_t*)row, count);
      break;
  }
}

// Back to floats, with zeros up to the next whole vector.
void read_row(CacheType type, const void* row, const uint16_t* scale, float* out, int64_t count) {
  switch (type) {
    case CacheType::kFloat32:
      memcpy(out, row, (size_t)count * sizeof *out);
      memset(out + count, 0, (size_t)(round_up((int)count, kLanes) - count) * sizeof *out);
      break;
    case CacheType::kFloat16:
      half_row_to_float((const uint16_t*)row, out, count);
      break;
    case CacheType::kInt8:
      codes_row_to_float((const int8_t*)row, *scale, out, count);
      break;
  }
}

// Where row `index` of a cache and its scale are.
char* row_at(const AttentionParams& p, Cache cache, int64_t index) {
  return (char*)cache.rows + index * cache.dim * cache_value_bytes(p.cache_type);
}
uint16_t* scale_at(Cache cache, int64_t index) { return cache.scales ? cache.scales + index : nullptr; }

void write_row(const AttentionParams& p, Cache cache, int64_t index, const float* in) {
  write_row(p.cache_type, in, row_at(p, cache, index), scale_at(cache, index), cache.dim);
}

// Where the rows behind a tile's are, keys and, where they are apart, values: asked for while the tile
// is worked on, a few at a time, for a processor has few reads under way. There may be no such rows.
struct Ahead {
  const char* rows[2];
  int64_t row_bytes[2];
};

Ahead rows_behind(const AttentionParams& p, const WorkItem& item, int64_t end) {
  const int64_t index = cache_row(p, item.batch, item.kv_head, end);
  const int64_t value_bytes = cache_value_bytes(p.cache_type);
  return {{row_at(p, key_cache(p), index), separate(p) ? row_at(p, value_cache(p), index) : nullptr},
          {p.head_dim * value_bytes, p.value_dim * value_bytes}};
}

EDGE_QKV_INLINE void prefetch(const Ahead& ahead, int n, int rows) {
  for (int which = 0; which < 2; ++which) {
    if (!ahead.rows[which]) continue;
    const char* at = ahead.rows[which] + n * ahead.row_bytes[which];
    for (int64_t i = 0; i < rows * ahead.row_bytes[which]; i += 64) __builtin_prefetch(at + i);
  }
}

// A row times the weight of the keys.
void weigh_row(const AttentionParams& p, const float* in, float* out) {
  int d = 0;
  for (; d + kLanes <= p.head_dim; d += kLanes) {
    store<kLanes>(out + d, load<kLanes>(in + d) * load<kLanes>(p.key_weight + d));
  }
  for (; d < p.head_dim; ++d) out[d] = in[d] * p.key_weight[d];
}

// Query row r of a kv head as [dim_pad]: rotated, times scale and log2(e), zeros beyond head_dim. It
// takes the weight of keys that are not rotated after they are weighted.
void load_query(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, int64_t r,
                float* out) {
  const int64_t t = r / plan.group, head = item.kv_head * plan.group + r % plan.group;
  const float* in = p.query + ((item.batch * p.tokens + t) * p.num_heads + head) * p.head_dim;
  memcpy(out, in, (size_t)p.head_dim * sizeof *out);
  memset(out + p.head_dim, 0, (size_t)(plan.dim_pad - p.head_dim) * sizeof *out);
  if (p.rotary != Rotary::kNone) {
    rotate_row(p, out, out, p.past + t, 1.0f);
  } else if (p.key_weight) {
    weigh_row(p, out, out);
  }
  const float factor = p.scale * kLog2e;
  for (int d = 0; d < plan.dim_pad; d += kLanes) store<kLanes>(out + d, load<kLanes>(out + d) * factor);
}

// `row` ([value_pad], overwritten) times `factor` to the output row of query row r.
void write_output(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, int64_t r,
                  float* row, float factor) {
  const int64_t t = r / plan.group, head = item.kv_head * plan.group + r % plan.group;
  float* out = p.output + ((item.batch * p.tokens + t) * p.num_heads + head) * p.value_dim;
  for (int d = 0; d < plan.value_pad; d += kLanes)
    store<kLanes>(row + d, load<kLanes>(row + d) * factor);
  if (output_is_rotated(p)) rotate_row(p, row, row, p.past + t, -1.0f);
  memcpy(out, row, (size_t)p.value_dim * sizeof *out);
}

// The rows of a tile that a query row sees.
struct Span {
  int from, to;
};

// What query row r sees of the `rows` cache rows from `begin` on, which are all sinks or all not.
Span visible_rows(const AttentionParams& p, const TilePlan& plan, int64_t r, int64_t begin, int rows) {
  const int64_t position = p.past + r / plan.group;
  const int64_t to = position + 1 - begin;
  const int64_t from = p.window > 0 && begin >= p.sinks ? to - p.window : 0;
  const auto inside = [&](int64_t n) { return n < 0 ? 0 : n < rows ? (int)n : rows; };
  return {inside(from), inside(to)};
}

// ---- the largest score ----

// Largest of four vectors, lane by lane.
template <int L>
EDGE_QKV_INLINE Float<L> largest_of(const Float<L> (&chains)[4]) {
  const Float<L> a = chains[0] > chains[1] ? chains[0] : chains[1];
  const Float<L> b = chains[2] > chains[3] ? chains[2] : chains[3];
  return a > b ? a : b;
}

// The largest of `least` and of scores [rows, query_pad], for L query rows. `from` and `to` say which
// rows of the tile each of them sees, null where all see all; other scores become kMasked. In four
// chains, for one comparison takes as long as several side by side.
template <int L>
EDGE_QKV_INLINE Float<L> largest_score(float* scores, int rows, int query_pad, const int32_t* from,
                                       const int32_t* to, Float<L> least) {
  if (from) {
    const Int<L> first = load<L>(from), limit = load<L>(to);
    for (int n = 0; n < rows; ++n) {
      const Int<L> at = splat<L>((int32_t)n);
      const Float<L> s = load<L>(scores + n * query_pad);
      store<L>(scores + n * query_pad, ((at >= first) & (at < limit)) ? s : splat<L>(kMasked));
    }
  }
  Float<L> chains[4] = {least, least, least, least};
  for (int n = 0; n < rows; n += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Float<L> s = load<L>(scores + (n + i < rows ? n + i : n) * query_pad);
      chains[i] = s > chains[i] ? s : chains[i];
    }
  }
  return largest_of<L>(chains);
}

// How a block's query rows lie in the lanes, and which arithmetic they meet.
struct Lanes {
  bool few;   // the layout for a few query rows
  int lanes;  // else of a vector across query rows: the narrowest that holds the block, or the widest
  int query_pad;  // query rows rounded up to such vectors
  bool integer;   // products of integers, see int8.h
};

Lanes choose_lanes(const AttentionParams& p, int query_rows) {
  int lanes = kLanes;
  while (lanes > 4 && lanes / 2 >= query_rows) lanes /= 2;
  // Keys that are rotated as they are read are no codes any more.
  const bool codes =
      EDGE_QKV_INTEGER_PRODUCTS && p.cache_type == CacheType::kInt8 && p.rotary != Rotary::kOnRead;
  return {!codes && query_rows <= kFewRows, lanes, round_up(query_rows, lanes), codes};
}

}  // namespace
}  // namespace EDGE_QKV_ISA
}  // namespace edge_qkv
