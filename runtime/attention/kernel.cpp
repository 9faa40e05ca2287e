// The attention kernel. This one source is compiled once
// per instruction set, with EDGE_QKV_ISA naming it.
//
// Two layouts. Blocks of several query rows put the lanes of a vector across query rows: the queries are
// transposed once per block, and a value of the tile, broadcast, meets a vector of queries; so neither
// the tile nor the scores need a transposition and the softmax has no horizontal steps. Blocks of a few
// query rows would leave such lanes empty and put them across head_dim for scores and across cache rows
// in the softmax. Weights times values has its lanes across head_dim in both.
//
// Scores are kept in units of log2, the factor log2(e) being folded into the query, so that a weight is
// a power of two.
#include "kernel.h"

#include "rows.h"
#include "simd.h"
#if EDGE_QKV_INTEGER_PRODUCTS
#include "int8.h"
#endif

namespace edge_qkv {
namespace EDGE_QKV_ISA {
namespace {

// Rows of the score product held in registers, times two
// vectors or one; and the same for the value product.
constexpr int kScoreRows = kWideFile ? 8 : 4, kLoneScoreRows = 8;
constexpr int kValueRows = 4;
constexpr int kValueVectors = kWideFile ? 4 : 2;

void append(const AttentionParams& p, int64_t batch, int64_t kv_head, int64_t begin, int64_t end,
            float* row) {
  for (int64_t t = begin; t < end; ++t) {
    const int64_t source = (batch * p.tokens + t) * p.kv_heads + kv_head;
    const int64_t index = cache_row(p, batch, kv_head, p.past + t);
    const float* key = p.key + source * p.head_dim;
    if (p.rotary == Rotary::kConjugate) {
      memcpy(row, key, (size_t)p.head_dim * sizeof *row);
      rotate_row(p, row, row, p.past + t, 1.0f);
      key = row;
    }
    write_row(p, key_cache(p), index, key);
    if (p.value) write_row(p, value_cache(p), index, p.value + source * p.value_dim);
  }
}

// A tile of cache rows in fp32: [rows, dim rounded up to whole vectors], zeros beyond dim.
struct Tile {
  const float* data;
  int64_t stride;
};

// Rows [begin, begin + rows) of one kv head. An fp32
// cache whose rows are whole vectors is used in place.
Tile load_tile(const AttentionParams& p, Cache cache, const WorkItem& item, int64_t begin, int rows,
               float* buffer) {
  const int padded = round_up(cache.dim, kLanes);
  const int64_t first = cache_row(p, item.batch, item.kv_head, begin);
  if (p.cache_type == CacheType::kFloat32 && padded == cache.dim) {
    return {(const float*)cache.rows + first * cache.dim, cache.dim};
  }
  for (int64_t n = 0; n < rows; ++n) {
    read_row(p.cache_type, row_at(p, cache, first + n), scale_at(cache, first + n), buffer + n * padded,
             cache.dim);
  }
  return {buffer, padded};
}

// The weighted and rotated copy of a tile that was stored raw.
Tile rotate_tile(const AttentionParams& p, const TilePlan& plan, Tile raw, int64_t begin, int rows,
                 float* buffer) {
  const int before = p.rotary_offset, behind = before + p.rotary_dim;
  const auto copy = [](const float* in, float* out, int from, int to) {
    memcpy(out + from, in + from, (size_t)(to - from) * sizeof *out);
  };
  for (int n = 0; n < rows; ++n) {
    const float* in = raw.data + n * raw.stride;
    float* out = buffer + n * plan.dim_pad;
    if (p.key_weight) {
      weigh_row(p, in, out);
      rotate_row(p, out, out, begin + n, 1.0f);
      copy(in, out, p.head_dim, plan.dim_pad);
    } else {
      copy(in, out, 0, before);
      rotate_row(p, in, out, begin + n, 1.0f);
      copy(in, out, behind, plan.dim_pad);
    }
  }
  return {buffer, plan.dim_pad};
}

// ---- scores: lanes across query rows ----

// scores[n, m] = sum over d of keys[n, d] * query[d, m] for N rows and V vectors of query rows.
template <int L, int V, int N>
EDGE_QKV_INLINE void score_block(const float* keys, int64_t stride, const float* query, int D,
                                 int query_pad, float* scores) {
  Float<L> acc[N][V] = {};
  for (int d = 0; d < D; ++d) {
    Float<L> q[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) q[v] = load<L>(query + (int64_t)d * query_pad + v * L);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const Float<L> k = splat<L>(keys[n * stride + d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[n][v] += k * q[v];
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store<L>(scores + n * query_pad + v * L, acc[n][v]);
  }
}

// All rows of the tile: as many blocks of N rows as fit, then of N/2 and so on.
template <int L, int V, int N>
void score_rows(Tile keys, int rows, const float* query, int D, int query_pad, float* scores,
                const Ahead& ahead) {
  int n = 0;
  for (; n + N <= rows; n += N) {
    prefetch(ahead, n, N);
    score_block<L, V, N>(keys.data + n * keys.stride, keys.stride, query, D, query_pad,
                         scores + n * query_pad);
  }
  if constexpr (N > 1) {
    const Tile rest = {keys.data + n * keys.stride, keys.stride};
    score_rows<L, V, N / 2>(rest, rows - n, query, D, query_pad, scores + n * query_pad, {});
  }
}

// scores [rows, query_pad] to weights in place, for L query rows. `from` and `to` say which rows of the
// tile each of them sees; null where all see all.
template <int L>
void softmax_lanes(float* scores, int rows, int query_pad, const int32_t* from, const int32_t* to,
                   float* row_max, float* row_sum, float* decay) {
  const Float<L> old_max = load<L>(row_max);
  const Float<L> top = largest_score<L>(scores, rows, query_pad, from, to, old_max);
  const Float<L> carry = exp2_nonpositive<L>(old_max - top);
  Float<L> sum = load<L>(row_sum) * carry;
  for (int n = 0; n < rows; ++n) {
    const Float<L> w = exp2_nonpositive<L>(load<L>(scores + n * query_pad) - top);
    store<L>(scores + n * query_pad, w);
    sum += w;
  }
  store<L>(row_max, top);
  store<L>(row_sum, sum);
  store<L>(decay, carry);
}

template <int L>
void weigh_tile(Tile keys, int rows, int query_rows, int query_pad, int D, bool masked,
                const Ahead& ahead, const Scratch& s) {
  int m = 0;
  if constexpr (L == kLanes) {  // narrower vectors hold the whole block
    for (; m + L < query_rows; m += 2 * L) {
      score_rows<L, 2, kScoreRows>(keys, rows, s.query + m, D, query_pad, s.scores + m,
                                   m == 0 ? ahead : Ahead{});
    }
  }
  if (m < query_rows) {
    score_rows<L, 1, kLoneScoreRows>(keys, rows, s.query + m, D, query_pad, s.scores + m,
                                     m == 0 ? ahead : Ahead{});
  }
  for (m = 0; m < query_rows; m += L) {
    softmax_lanes<L>(s.scores + m, rows, query_pad, masked ? s.from + m : nullptr, s.to + m,
                     s.row_max + m, s.row_sum + m, s.decay + m);
  }
}

// ---- scores: lanes across head_dim ----

// Weights of one query row [dim_pad] for a tile: weights
// [rows rounded up to whole vectors], 0 outside `visible`.
void weigh_tile_for_row(Tile keys, int rows, const float* query, int dim_pad, Span visible,
                        float* weights, float* row_max, float* row_sum, float* decay) {
  for (int n = 0; n < rows; n += 4) {
    const float* k[4];  // beyond the last row the last one again: read, then masked
    for (int i = 0; i < 4; ++i) k[i] = keys.data + (n + i < rows ? n + i : rows - 1) * keys.stride;
    Float<kLanes> a = {}, b = {}, c = {}, e = {};
    for (int d = 0; d < dim_pad; d += kLanes) {
      const Float<kLanes> q = load<kLanes>(query + d);
      a += q * load<kLanes>(k[0] + d);
      b += q * load<kLanes>(k[1] + d);
      c += q * load<kLanes>(k[2] + d);
      e += q * load<kLanes>(k[3] + d);
    }
    store<4>(weights + n, sum_lanes(fold(a), fold(b), fold(c), fold(e)));
  }
  const int padded = round_up(rows, kLanes);
  for (int n = 0; n < visible.from; ++n) weights[n] = kMasked;
  for (int n = visible.to; n < padded; ++n) weights[n] = kMasked;

  Float<kLanes> top_lanes = splat<kLanes>(*row_max);
  for (int n = 0; n < padded; n += kLanes) {
    const Float<kLanes> s = load<kLanes>(weights + n);
    top_lanes = s > top_lanes ? s : top_lanes;
  }
  const float top = largest_lane(top_lanes);

  Float<kLanes> sum_of_lanes = {};
  for (int n = 0; n < padded; n += kLanes) {
    const Float<kLanes> w = exp2_nonpositive<kLanes>(load<kLanes>(weights + n) - top);
    store<kLanes>(weights + n, w);
    sum_of_lanes += w;
  }
  const Float<4> quarter = fold(sum_of_lanes);
  *decay = exp2_nonpositive<4>(splat<4>(*row_max - top))[0];
  *row_sum = *row_sum * *decay + ((quarter[0] + quarter[1]) + (quarter[2] + quarter[3]));
  *row_max = top;
}

// ---- values ----

// Weights of a tile: query row m and cache row n at data[m * row_stride + n * tile_stride].
struct Weights {
  const float* data;
  int row_stride;
  int tile_stride;
};

// acc[m, d] = acc[m, d] * decay[m] + sum over n of weights[m, n] * values[n, d], for M query rows and V
// vectors of d.
template <int M, int V>
EDGE_QKV_INLINE void value_block(Weights weights, Tile values, int rows, const float* decay, float* acc,
                                 int value_pad) {
  Float<kLanes> sum[M][V];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[m][v] = load<kLanes>(acc + m * value_pad + v * kLanes) * decay[m];
  }
  for (int n = 0; n < rows; ++n) {
    Float<kLanes> x[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) x[v] = load<kLanes>(values.data + n * values.stride + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Float<kLanes> w =
          splat<kLanes>(weights.data[m * weights.row_stride + (int64_t)n * weights.tile_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[m][v] += w * x[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store<kLanes>(acc + m * value_pad + v * kLanes, sum[m][v]);
  }
}

// All query rows of the block: as many blocks of M rows as fit, then of M/2 and so on.
template <int M>
void accumulate(Weights weights, Tile values, int rows, int query_rows, const float* decay, float* acc,
                int value_pad) {
  int m = 0;
  for (; m + M <= query_rows; m += M) {
    const Weights w = {weights.data + m * weights.row_stride, weights.row_stride, weights.tile_stride};
    int d = 0;
    for (; d + kValueVectors * kLanes <= value_pad; d += kValueVectors * kLanes) {
      value_block<M, kValueVectors>(w, {values.data + d, values.stride}, rows, decay + m,
                                    acc + m * value_pad + d, value_pad);
    }
    for (; d < value_pad; d += kLanes) {
      value_block<M, 1>(w, {values.data + d, values.stride}, rows, decay + m, acc + m * value_pad + d,
                        value_pad);
    }
  }
  if constexpr (M > 1) {
    const Weights rest = {weights.data + m * weights.row_stride, weights.row_stride,
                          weights.tile_stride};
    accumulate<M / 2>(rest, values, rows, query_rows - m, decay + m, acc + m * value_pad, value_pad);
  }
}

// ---- the loop over tiles ----

void load_queries(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, Lanes lanes,
                  const Scratch& s) {
  if (lanes.few) {
    for (int m = 0; m < item.rows; ++m) {
      load_query(p, plan, item, item.first_row + m, s.query + m * plan.dim_pad);
    }
    return;
  }
  for (int m = 0; m < lanes.query_pad; ++m) {
    if (m < item.rows) {
      load_query(p, plan, item, item.first_row + m, s.row);
    } else {
      memset(s.row, 0, (size_t)plan.dim_pad * sizeof *s.row);
    }
#if EDGE_QKV_INTEGER_PRODUCTS
    if (lanes.integer) {
      query_to_digits(s.row, p.head_dim, plan.dim_pad, m, lanes.query_pad, (Group*)s.query,
                      s.query_scale + m);
      continue;
    }
#endif
    for (int d = 0; d < p.head_dim; ++d) s.query[(int64_t)d * lanes.query_pad + m] = s.row[d];
  }
}

// Adds `rows` cache rows from `begin` on, all sinks or all not, to what the block has seen.
void attend_tile(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, Lanes lanes,
                 int64_t begin, int rows, const Scratch& s) {
  const auto visible = [&](int m) { return visible_rows(p, plan, item.first_row + m, begin, rows); };
  // The first query row sees least at the end of the tile, the last one least at its beginning.
  const bool masked = !lanes.few && (visible(0).to < rows || visible(item.rows - 1).from > 0);
  for (int m = 0; masked && m < lanes.query_pad; ++m) {
    s.from[m] = visible(m).from;
    s.to[m] = visible(m).to;
  }
  const Ahead ahead = rows_behind(p, item, begin + rows);
#if EDGE_QKV_INTEGER_PRODUCTS
  if (lanes.integer) return attend_codes(p, plan, item, lanes, begin, rows, masked, ahead, s);
#endif
  const Tile stored = load_tile(p, key_cache(p), item, begin, rows, s.values);
  const Tile keys =
      p.rotary == Rotary::kOnRead ? rotate_tile(p, plan, stored, begin, rows, s.keys) : stored;
  if (lanes.few) {
    for (int m = 0; m < item.rows; ++m) {
      weigh_tile_for_row(keys, rows, s.query + m * plan.dim_pad, plan.dim_pad, visible(m),
                         s.scores + m * plan.tile_rows, s.row_max + m, s.row_sum + m, s.decay + m);
    }
  } else if (lanes.lanes == kLanes) {
    weigh_tile<kLanes>(keys, rows, item.rows, lanes.query_pad, p.head_dim, masked, ahead, s);
  } else if constexpr (kLanes > 4) {
    if (lanes.lanes == 4) {
      weigh_tile<4>(keys, rows, item.rows, lanes.query_pad, p.head_dim, masked, ahead, s);
    } else {
      weigh_tile<8>(keys, rows, item.rows, lanes.query_pad, p.head_dim, masked, ahead, s);
    }
  }

  const Tile values = separate(p) ? load_tile(p, value_cache(p), item, begin, rows, s.values) : stored;
  const Weights weights =
      lanes.few ? Weights{s.scores, plan.tile_rows, 1} : Weights{s.scores, 1, lanes.query_pad};
  accumulate<kValueRows>(weights, values, rows, item.rows, s.decay, s.acc, plan.value_pad);
}

void attend(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, const Scratch& s,
            float* partial) {
  const Lanes lanes = choose_lanes(p, item.rows);
  load_queries(p, plan, item, lanes, s);
  for (int m = 0; m < lanes.query_pad; ++m) {
    s.row_max[m] = kNoScore;
    s.row_sum[m] = 0.0f;
  }
  memset(s.acc, 0, (size_t)item.rows * plan.value_pad * sizeof *s.acc);

  for (const RowRange& range : item.ranges) {
    for (int64_t begin = range.begin; begin < range.end; begin += plan.tile_rows) {
      const int64_t rows = min(range.end - begin, plan.tile_rows);
      attend_tile(p, plan, item, lanes, begin, (int)rows, s);
    }
  }

  // A row that saw nothing here leaves sums of 0 under the score kNoScore, which merge to nothing.
  for (int m = 0; m < item.rows; ++m) {
    float* acc = s.acc + (int64_t)m * plan.value_pad;
    if (!partial) {
      write_output(p, plan, item, item.first_row + m, acc, 1.0f / s.row_sum[m]);
    } else {
      float* out = partial + (int64_t)m * (p.value_dim + kPartialExtra);
      memcpy(out, acc, (size_t)p.value_dim * sizeof *out);
      out[p.value_dim] = s.row_max[m];
      out[p.value_dim + 1] = s.row_sum[m];
    }
  }
}

void merge(const AttentionParams& p, const TilePlan& plan, const WorkItem& item, const float* partial,
           int splits, size_t stride, float* row) {
  const int V = p.value_dim;
  for (int m = 0; m < item.rows; ++m) {
    const float* part = partial + (int64_t)m * (V + kPartialExtra);
    float top = kNoScore;
    for (int i = 0; i < splits; ++i) top = part[i * stride + V] > top ? part[i * stride + V] : top;
    float sum = 0.0f;
    memset(row, 0, (size_t)plan.value_pad * sizeof *row);
    for (int i = 0; i < splits; ++i) {
      const float* from = part + i * stride;
      const float factor = exp2_nonpositive<4>(splat<4>(from[V] - top))[0];
      sum += from[V + 1] * factor;
      int d = 0;
      for (; d + kLanes <= V; d += kLanes) {
        store<kLanes>(row + d, load<kLanes>(row + d) + load<kLanes>(from + d) * factor);
      }
      for (; d < V; ++d) row[d] += from[d] * factor;
    }
    write_output(p, plan, item, item.first_row + m, row, 1.0f / sum);
  }
}

void half_to_float(const uint16_t* in, float* out, size_t count) {
  // half_row_to_float writes whole vectors; a caller of this gets `count` floats.
  const size_t whole = count / kLanes * kLanes;
  half_row_to_float(in, out, (int64_t)whole);
  float tail[kLanes];
  half_row_to_float(in + whole, tail, (int64_t)(count - whole));
  memcpy(out + whole, tail, (count - whole) * sizeof *out);
}

void float_to_half(const float* in, uint16_t* out, size_t count) {
  float_row_to_half(in, out, (int64_t)count);
}

#define EDGE_QKV_STRING_(x) #x
#define EDGE_QKV_STRING(x) EDGE_QKV_STRING_(x)

}  // namespace

extern const Kernel kKernel = {EDGE_QKV_STRING(EDGE_QKV_ISA),
                               kLanes,
                               append,
                               attend,
                               merge,
                               read_row,
                               write_row,
                               half_to_float,
                               float_to_half};

}  // namespace EDGE_QKV_ISA
}  // namespace edge_qkv
