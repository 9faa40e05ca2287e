// Attention over int8 rows by integer products, both of them: queries times codes and weights times
// codes. Included by kernel.cpp, once per instruction set that has such products.
//
// Queries and weights become integers of 16 bits, each with one scale a query row (weights: and tile),
// and these two digits of 8 bits, so that one byte product serves for each digit (int8_products.h has
// the products). The row's own scale meets the sum in the scores, and the weight before it is rounded in
// the values. What the rounding costs, K being the integer's largest value (kMostQuery, kMostWeight),
// relative to exact arithmetic over the same codes:
// - a score is off by up to max|q| / 2K * sum |k|: 1.5e-5 of max|q| sum |k|, and in proportion to
//   head_dim where that is over 516, for sums must fit;
// - an output is off by up to 1 / 2K of the tile's largest weight * scale for each row of the tile.
// Sums are exact: modulo 2^32 on the way, within it at the end.
#pragma once

#include "int8_products.h"
#include "rows.h"

namespace edge_qkv {
namespace EDGE_QKV_ISA {
namespace {

// The largest integers. A query's digits are those of q + kQueryOffset where digits are unsigned, whose
// products with the offset are taken out again; elsewhere both digits are signed, the high one being
// rounded. A weight is never negative. It may exceed kMostWeight a little, by rounding.
constexpr int kMostQuery = kDigitsAreUnsigned ? 32767 : 32639;
constexpr int kMostCode = 127;
constexpr uint32_t kQueryOffset = kDigitsAreUnsigned ? 32768 : 0;
constexpr float kMostWeight = kDigitsAreUnsigned ? 65500.0f : 32600.0f;
constexpr uint32_t kHighRound = kDigitsAreUnsigned ? 0 : 128;

// ---- queries ----

// Query row m of the block, [dim_pad] in `row`, to its digits: [groups_of(D), 2, query_pad] groups of
// dimensions; and to its scale.
void query_to_digits(const float* row, int D, int dim_pad, int m, int query_pad, Group* digits,
                     float* scale) {
  Float<kLanes> largest = {}, poison = {};
  for (int d = 0; d < dim_pad; d += kLanes) {
    const Float<kLanes> x = load<kLanes>(row + d);
    const Float<kLanes> magnitude = (Float<kLanes>)((Bits<kLanes>)x & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
    poison += x * 0.0f;  // NaN where there is a NaN or an infinity, which must reach the output
  }
  const Float<4> nans = fold(poison);
  const int most = D > INT32_MAX / kMostCode / kMostQuery ? INT32_MAX / kMostCode / D : kMostQuery;
  const float step = largest_lane(largest) / (float)most;
  *scale = step + ((nans[0] + nans[1]) + (nans[2] + nans[3]));
  const Float<kLanes> divisor = splat<kLanes>(step > 0.0f ? step : 1.0f);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  const float kRound = 12582912.0f, bound = (float)most;
  for (int d = 0; d < dim_pad; d += kLanes) {
    Float<kLanes> x = load<kLanes>(row + d) / divisor;
    x = x > bound ? splat<kLanes>(bound) : x;
    x = x < -bound ? splat<kLanes>(-bound) : x;
    const Bits<kLanes> q = (Bits<kLanes>)(x + kRound) + kQueryOffset;
    const Simd<kLanes>::Code parts[2] = {
        __builtin_convertvector((q + kHighRound) >> 8, Simd<kLanes>::Code),
        __builtin_convertvector(q, Simd<kLanes>::Code)};
    for (int digit = 0; digit < 2; ++digit) {
      int8_t bytes[kLanes];
      memcpy(bytes, &parts[digit], sizeof bytes);
      for (int i = 0; i < kLanes && d + i < D; i += 4) {
        Group* group = digits + ((d + i) / kGroup * 2 + digit) * (int64_t)query_pad + m;
        memcpy(group->bytes + (d + i) % kGroup, bytes + i, 4);
      }
    }
  }
}

// ---- tiles ----

// What the products need beside the codes, each [tile_rows].
struct TileScales {
  float* key;        // scales
  float* value;      // scales
  float* value_log;  // at least log2 of a value scale, and less than 0.1 more
  uint32_t* offset;  // what kQueryOffset adds to the product of a row
};

TileScales tile_scales(const TilePlan& plan, const Scratch& s) {
  float* all = s.tile_scales;
  return {all, all + plan.tile_rows, all + 2 * plan.tile_rows, (uint32_t*)(all + 3 * plan.tile_rows)};
}

// offset[n] = kQueryOffset times the sum of the codes of row n.
void offset_rows(Codes keys, int rows, int groups, uint32_t* offset) {
  const Bits<4> ones = splat<4>(0x01010101u);
  for (int n = 0; n < rows; n += 4) {
    const int8_t* row[4];
    for (int i = 0; i < 4; ++i) row[i] = keys.data + (n + i < rows ? n + i : rows - 1) * keys.stride;
    Bits<4> sum[4] = {};
    int g = 0;
    for (; g + 4 <= groups; g += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Bits<4> codes;
        memcpy(&codes, row[i] + 4 * g, sizeof codes);
        sum[i] = add_products(sum[i], ones, codes);
      }
    }
    for (; g < groups; ++g) {
      for (int i = 0; i < 4; ++i) {
        sum[i] = add_products(sum[i], ones, Bits<4>{four_bytes(row[i] + 4 * g)});
      }
    }
    const auto exact = [&](int i) { return __builtin_convertvector((Int<4>)sum[i], Float<4>); };
    const Float<4> total = sum_lanes(exact(0), exact(1), exact(2), exact(3));
    store<4>(offset + n, (Bits<4>)__builtin_convertvector(total, Int<4>) * kQueryOffset);
  }
}

// The values of a tile, the first V codes of rows `stride` apart, as
// [groups_of(rows), value_pad], each a group of rows' codes of one dimension.
// Behind the last row comes that row again: its weights there are 0.
void interleave_rows(const int8_t* codes, int64_t stride, int rows, int V, int value_pad, Group* out) {
  for (int n = 0; n < rows; n += kGroup, out += value_pad) {
    const int8_t* row[kGroup];
    for (int i = 0; i < kGroup; ++i) row[i] = codes + (n + i < rows ? n + i : rows - 1) * stride;
    int d = 0;
    for (; d + 16 <= V; d += 16) interleave(row, d, out);
    if (d < V && V >= 16) {
      interleave(row, V - 16, out);
      d = V;
    }
    for (; d < V; ++d) {
      for (int i = 0; i < kGroup; i += 4) {
        const int8_t four[4] = {row[i][d], row[i + 2][d], row[i + 1][d], row[i + 3][d]};
        memcpy(out[d].bytes + i, four, sizeof four);
      }
    }
    for (; d < value_pad; ++d) out[d] = {};
  }
}

void load_scales(const uint16_t* scales, int rows, float* out, float* log) {
  int n = 0;
  for (; n < rows; n += kLanes) {
    uint16_t some[kLanes] = {};
    memcpy(some, scales + n, (size_t)(rows - n < kLanes ? rows - n : kLanes) * sizeof *some);
    const Float<kLanes> scale = from_half(some);
    store<kLanes>(out + n, scale);
    // Exponent and mantissa of a float, read as one number, are log2 of it, up to 0.0861 too small.
    if (log) {
      const Float<kLanes> bits = __builtin_convertvector((Int<kLanes>)scale, Float<kLanes>);
      store<kLanes>(log + n, bits * 0x1p-23f - 126.9f);
    }
  }
}

// ---- scores ----

// All rows of the tile, a multiple of kLeastScoreRows: as
// many blocks of N rows as fit, then of N/2 and so on.
template <int L, int V, int N>
void code_score_rows(Codes keys, int rows, const Group* query, int groups, int query_pad,
                     const uint32_t* offset, const float* key_scale, const float* query_scale,
                     float* scores, const Ahead& ahead) {
  int n = 0;
  for (; n + N <= rows; n += N) {
    prefetch(ahead, n, N);
    code_score_block<L, V, N>(keys.data + n * keys.stride, keys.stride, query, groups, query_pad,
                              offset + n, key_scale + n, query_scale, scores + n * query_pad);
  }
  if constexpr (N > kLeastScoreRows) {
    const Codes rest = {keys.data + n * keys.stride, keys.stride};
    code_score_rows<L, V, N / 2>(rest, rows - n, query, groups, query_pad, offset + n, key_scale + n,
                                 query_scale, scores + n * query_pad, {});
  }
}

// ---- weights ----

// scores [rows, query_pad] to the digits of weights times value scales, in place, as store_digits leaves
// them: groups of rows, of each four in the order 0, 2, 1, 3; for L query rows. The integers are
// relative to the largest of the tile: `weight_scale` takes them back. `from` and `to` say which rows of
// the tile each query row sees; null where all see all.
template <int L>
void weights_to_digits(float* scores, int rows, int query_pad, const int32_t* from, const int32_t* to,
                       const TileScales& tile, float* row_max, float* row_sum, float* decay,
                       float* weight_scale) {
  const Float<L> top = largest_score<L>(scores, rows, query_pad, from, to, splat<L>(kNoScore));
  // At least the largest log2 of a weight times its value scale. Not from the scores themselves: beside
  // large ones a scale would be lost.
  Float<L> chains[4];
  for (Float<L>& chain : chains) chain = splat<L>(kNoScore);
  for (int n = 0; n < rows; n += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int at = n + i < rows ? n + i : n;
      const Float<L> product = load<L>(scores + at * query_pad) - top + tile.value_log[at];
      chains[i] = product > chains[i] ? product : chains[i];
    }
  }
  Float<L> most = largest_of<L>(chains);
  // Rows of tiny scales under one that has all the weight vanish beside it.
  most = most > -80.0f ? most : splat<L>(-80.0f);
  // Value scales are at most 65504: `most` is at most 16.1.
  const Float<L> factor = (kMostWeight * 0x1p-17f) / exp2_nonpositive<L>(most - 17.0f);

  Float<L> sum = {};
  const auto weight = [&](int n) {
    if (n >= rows) return Bits<L>{};
    const Float<L> w = exp2_nonpositive<L>(load<L>(scores + n * query_pad) - top);
    sum += w;
    // Adding 2^23 leaves the nearest integer in the low mantissa bits.
    return (Bits<L>)(w * (factor * tile.value[n]) + 8388608.0f);
  };
  for (int n = 0; n < rows; n += kGroup) {
    Bits<L> high[kGroup / 4], low[kGroup / 4];
#pragma GCC unroll 2
    for (int i = 0; i < kGroup / 4; ++i) {
      const int at = n + 4 * i;
      const Bits<L> a = weight(at), b = weight(at + 1), c = weight(at + 2), e = weight(at + 3);
      const Bits<L> ab = (a & 0xffffu) | b << 16, ce = (c & 0xffffu) | e << 16;
      const uint32_t kHigh = 0xff00ff00u, kLow = 0x00ff00ffu, kRound = kHighRound * 0x10001u;
      high[i] = ((ab + kRound) >> 8 & kLow) | ((ce + kRound) & kHigh);
      low[i] = (ab & kLow) | ((ce & kLow) << 8);
    }
    store_digits<L>(high, low, (uint32_t*)scores + n / 2 * query_pad, query_pad);
  }
  const Float<L> old_max = load<L>(row_max);
  const Float<L> now = top > old_max ? top : old_max;
  const Float<L> carry = exp2_nonpositive<L>(old_max - now), share = exp2_nonpositive<L>(top - now);
  store<L>(row_max, now);
  store<L>(row_sum, load<L>(row_sum) * carry + sum * share);
  store<L>(decay, carry);
  store<L>(weight_scale, share / factor);
}

// ---- values ----

// All query rows of the block: as many blocks of M rows as fit, then of M/2 and so on.
template <int M>
void accumulate_codes(const uint32_t* weights, int query_pad, const Group* values, int groups,
                      int query_rows, const float* decay, const float* weight_scale, float* acc,
                      int value_pad) {
  constexpr int V = kCodeValueVectors;
  int m = 0;
  for (; m + M <= query_rows; m += M) {
    const uint32_t* some = weights_of(weights, query_pad, m);
    float* to = acc + m * value_pad;
    int d = 0;
    for (; d + V * kLanes <= value_pad; d += V * kLanes) {
      code_value_block<M, V>(some, query_pad, values + d, groups, decay + m, weight_scale + m, to + d,
                             value_pad);
    }
    for (; d < value_pad; d += kLanes) {
      code_value_block<M, 1>(some, query_pad, values + d, groups, decay + m, weight_scale + m, to + d,
                             value_pad);
    }
  }
  if constexpr (M > 1) {
    accumulate_codes<M / 2>(weights_of(weights, query_pad, m), query_pad, values, groups, query_rows - m,
                            decay + m, weight_scale + m, acc + m * value_pad, value_pad);
  }
}

// ---- a tile ----

template <int L>
void weigh_codes(Codes keys, const TileScales& tile, int rows, int query_rows, int query_pad, int groups,
                 bool masked, const Ahead& ahead, const Scratch& s) {
  const Group* query = (const Group*)s.query;
  const int scored = round_up(rows, kLeastScoreRows);
  int m = 0;
  for (; m + kCodeScoreVectors * L <= query_pad; m += kCodeScoreVectors * L) {
    code_score_rows<L, kCodeScoreVectors, kCodeScoreRows>(keys, scored, query + m, groups, query_pad,
                                                          tile.offset, tile.key, s.query_scale + m,
                                                          s.scores + m, m == 0 ? ahead : Ahead{});
  }
  for (; m < query_pad; m += L) {
    code_score_rows<L, 1, kCodeScoreRows>(keys, scored, query + m, groups, query_pad, tile.offset,
                                          tile.key, s.query_scale + m, s.scores + m,
                                          m == 0 ? ahead : Ahead{});
  }
  for (m = 0; m < query_rows; m += L) {
    weights_to_digits<L>(s.scores + m, rows, query_pad, masked ? s.from + m : nullptr, s.to + m, tile,
                         s.row_max + m, s.row_sum + m, s.decay + m, s.weight_scale + m);
  }
}

// As attend_tile, for int8 rows whose keys need no rotation. s.from and s.to are set where `masked`.
void attend_codes(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, Lanes lanes,
                  int64_t begin, int rows, bool masked, const Ahead& ahead, const Scratch& s) {
  const int D = p.head_dim, groups = groups_of(D);
  const int64_t first = cache_row(p, item.batch, item.kv_head, begin);
  const Cache values = separate(p) ? value_cache(p) : key_cache(p);
  TileScales tile = tile_scales(plan, s);
  const Codes keys = load_codes((const int8_t*)row_at(p, key_cache(p), first), D, rows, (int8_t*)s.keys);
  load_scales(values.scales + first, rows, tile.value, tile.value_log);
  if (separate(p)) {
    load_scales(p.key_scales + first, rows, tile.key, nullptr);
  } else {
    tile.key = tile.value;
  }
  if constexpr (kDigitsAreUnsigned) offset_rows(keys, rows, groups, tile.offset);
  if (lanes.lanes == kLanes) {
    weigh_codes<kLanes>(keys, tile, rows, item.rows, lanes.query_pad, groups, masked, ahead, s);
  } else if constexpr (kLanes > 4) {
    if (lanes.lanes == 4) {
      weigh_codes<4>(keys, tile, rows, item.rows, lanes.query_pad, groups, masked, ahead, s);
    } else {
      weigh_codes<8>(keys, tile, rows, item.rows, lanes.query_pad, groups, masked, ahead, s);
    }
  }
  Group* interleaved = (Group*)s.values;
  interleave_rows((const int8_t*)row_at(p, values, first), values.dim, rows, p.value_dim, plan.value_pad,
                  interleaved);
  accumulate_codes<kCodeValueRows>((const uint32_t*)s.scores, lanes.query_pad, interleaved,
                                   groups_of(rows), item.rows, s.decay, s.weight_scale, s.acc,
                                   plan.value_pad);
}

}  // namespace
}  // namespace EDGE_QKV_ISA
}  // namespace edge_qkv
