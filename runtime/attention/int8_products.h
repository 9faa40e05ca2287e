// Products of the integers of int8.h: blocks of them in registers, and the layouts that they
// read. Included by int8.h, once per instruction set that has such products.
//
// Two kinds. A dot product multiplies 4 bytes of a lane with 4 of another; a matrix product 2 rows of 8
// bytes with 2 rows of 8, which is twice the work of an instruction. Both give the same integers.
#pragma once

#include "rows.h"

namespace edge_qkv {
namespace EDGE_QKV_ISA {
namespace {

// So many bytes along the sum of a product: of a row's
// dimensions in the scores, of a tile's rows in the values.
constexpr int kGroup = EDGE_QKV_MATRIX_PRODUCTS ? 8 : 4;
struct Group {
  int8_t bytes[kGroup];
};

int groups_of(int count) { return (count + kGroup - 1) / kGroup; }

uint32_t four_bytes(const void* p) {
  uint32_t four;
  memcpy(&four, p, sizeof four);
  return four;
}

// Codes of a tile's keys: row n at data + n * stride, in whole groups; where products are of matrices,
// rows n and n + 1 side by side, a group of one and then of the other.
struct Codes {
  const int8_t* data;
  int64_t stride;
};

typedef int8_t Bytes __attribute__((vector_size(16)));

Bytes load_bytes(const int8_t* p) {
  Bytes v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Four rows, 16 dimensions from `d` on, to the codes of rows 0, 2, 1 and 3 of each dimension side by
// side, which is the order in which weights_to_digits leaves theirs.
EDGE_QKV_INLINE void interleave_four(const int8_t* const* row, int d, Bits<4> (&out)[4]) {
  const Bytes a = load_bytes(row[0] + d), b = load_bytes(row[1] + d);
  const Bytes c = load_bytes(row[2] + d), e = load_bytes(row[3] + d);
#define EDGE_QKV_LOW(x, y) \
  __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define EDGE_QKV_HIGH(x, y) \
  __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
  typedef int16_t Pairs __attribute__((vector_size(16)));
  const Pairs ac[2] = {(Pairs)EDGE_QKV_LOW(a, c), (Pairs)EDGE_QKV_HIGH(a, c)};
  const Pairs be[2] = {(Pairs)EDGE_QKV_LOW(b, e), (Pairs)EDGE_QKV_HIGH(b, e)};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = (Bits<4>)__builtin_shufflevector(ac[i], be[i], 0, 8, 1, 9, 2, 10, 3, 11);
    out[2 * i + 1] = (Bits<4>)__builtin_shufflevector(ac[i], be[i], 4, 12, 5, 13, 6, 14, 7, 15);
  }
#undef EDGE_QKV_LOW
#undef EDGE_QKV_HIGH
}

#if EDGE_QKV_MATRIX_PRODUCTS

// Query rows, cache rows and dimensions are taken in pairs: a product has the values of two rows and two
// columns in its four lanes, row by row.

// Rows of the score product and vectors of query rows that are held in registers; the same of values.
constexpr int kCodeScoreRows = 8, kLeastScoreRows = 2;
constexpr int kCodeScoreVectors = 2;
constexpr int kCodeValueRows = 8;
constexpr int kCodeValueVectors = 2;

// The codes of a tile's keys, in pairs of rows, zeros behind each; behind an odd last one it again.
Codes load_codes(const int8_t* codes, int D, int rows, int8_t* buffer) {
  const int width = kGroup * groups_of(D), whole = D / kGroup * kGroup;
  for (int n = 0; n < rows; n += 2) {
    int8_t* out = buffer + (int64_t)n * width;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int8_t* row = codes + (int64_t)(n + i < rows ? n + i : n) * D;
      int8_t* to = out + kGroup * i;
      for (int d = 0; d < whole; d += kGroup) memcpy(to + 2 * d, row + d, kGroup);
      if (whole < D) {
        memset(to + 2 * whole, 0, kGroup);
        memcpy(to + 2 * whole, row + whole, (size_t)(D - whole));
      }
    }
  }
  return {buffer, width};
}

// Eight rows, 16 dimensions from `d` on: out[d] gets a dimension's codes.
EDGE_QKV_INLINE void interleave(const int8_t* const* row, int d, Group* out) {
  Bits<4> near[4], far[4];
  interleave_four(row, d, near);
  interleave_four(row + 4, d, far);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Bits<4> some = __builtin_shufflevector(near[i], far[i], 0, 4, 1, 5);
    const Bits<4> more = __builtin_shufflevector(near[i], far[i], 2, 6, 3, 7);
    memcpy(out + d + 4 * i, &some, sizeof some);
    memcpy(out + d + 4 * i + 2, &more, sizeof more);
  }
}

// Where the weights of query row m are; the places of four query rows are one vector wide.
const uint32_t* weights_of(const uint32_t* weights, int query_pad, int m) {
  return weights + m / 2 % 2 * query_pad + m / 4 * 4;
}

// The digits of eight cache rows' weights, of four query rows: [2, 2, query_pad], the digit, and the
// first or second pair of the four.
template <int L>
EDGE_QKV_INLINE void store_digits(const Bits<L> (&high)[2], const Bits<L> (&low)[2], uint32_t* out,
                                  int query_pad) {
  store<L>(out, __builtin_shufflevector(high[0], high[1], 0, 4, 1, 5));
  store<L>(out + query_pad, __builtin_shufflevector(high[0], high[1], 2, 6, 3, 7));
  store<L>(out + 2 * query_pad, __builtin_shufflevector(low[0], low[1], 0, 4, 1, 5));
  store<L>(out + 3 * query_pad, __builtin_shufflevector(low[0], low[1], 2, 6, 3, 7));
}

EDGE_QKV_INLINE Bits<4> load_pair(const void* p) { return load<4>((const uint32_t*)p); }

// scores[n, m] of N rows and V vectors of query rows.
template <int L, int V, int N>
EDGE_QKV_INLINE void code_score_block(const int8_t* keys, int64_t stride, const Group* query, int groups,
                                      int query_pad, const uint32_t*, const float* key_scale,
                                      const float* query_scale, float* scores) {
  Bits<4> sum[2 * V][N / 2] = {};
  for (int digit = 0; digit < 2; ++digit) {
    for (int g = 0; g < groups; ++g) {
      Bits<4> q[2 * V];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * V; ++v)
        q[v] = load_pair(query + (2 * g + digit) * (int64_t)query_pad + 2 * v);
#pragma GCC unroll 8
      for (int n = 0; n < N / 2; ++n) {
        const Bits<4> k = load_pair(keys + 2 * n * stride + 2 * kGroup * g);
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; ++v) sum[v][n] = add_matrix_product(sum[v][n], q[v], k);
      }
    }
    if (digit == 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N / 2; ++n) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; ++v) sum[v][n] <<= 8;
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const Float<4> scale = load<4>(query_scale + 4 * v);
#pragma GCC unroll 8
    for (int n = 0; n < N / 2; ++n) {
      const Int<4> a = (Int<4>)sum[2 * v][n], b = (Int<4>)sum[2 * v + 1][n];
      const Int<4> rows[2] = {__builtin_shufflevector(a, b, 0, 2, 4, 6),
                              __builtin_shufflevector(a, b, 1, 3, 5, 7)};
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Float<4> exact = __builtin_convertvector(rows[i], Float<4>);
        store<4>(scores + (2 * n + i) * query_pad + 4 * v, exact * (scale * key_scale[2 * n + i]));
      }
    }
  }
}

// acc[m, d] = acc[m, d] * decay[m] + weight_scale[m] * sum over n of weights[n, m] * values[n, d], for M
// query rows and V vectors of d.
template <int M, int V>
EDGE_QKV_INLINE void code_value_block(const uint32_t* weights, int query_pad, const Group* values,
                                      int groups, const float* decay, const float* weight_scale,
                                      float* acc, int value_pad) {
  constexpr int kPairs = (M + 1) / 2;
  Bits<4> sum[kPairs][2 * V] = {};
  for (int digit = 0; digit < 2; ++digit) {
    for (int g = 0; g < groups; ++g) {
      Bits<4> x[2 * V];
#pragma GCC unroll 8
      for (int v = 0; v < 2 * V; ++v) x[v] = load_pair(values + (int64_t)g * value_pad + 2 * v);
#pragma GCC unroll 8
      for (int m = 0; m < kPairs; ++m) {
        const uint32_t* group = weights + (4 * g + 2 * digit) * (int64_t)query_pad;
        const Bits<4> w = load_pair(weights_of(group, query_pad, 2 * m));
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; ++v) sum[m][v] = add_matrix_product(sum[m][v], w, x[v]);
      }
    }
    if (digit == 0) {
#pragma GCC unroll 8
      for (int m = 0; m < kPairs; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * V; ++v) sum[m][v] <<= 8;
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Int<4> a = (Int<4>)sum[m / 2][2 * v], b = (Int<4>)sum[m / 2][2 * v + 1];
      const Int<4> row =
          m % 2 ? __builtin_shufflevector(a, b, 2, 3, 6, 7) : __builtin_shufflevector(a, b, 0, 1, 4, 5);
      float* at = acc + m * value_pad + v * kLanes;
      const Float<4> exact = __builtin_convertvector(row, Float<4>);
      store<4>(at, load<4>(at) * decay[m] + exact * weight_scale[m]);
    }
  }
}

#else

// Rows of the score product and vectors of query rows that are held in registers; the same of values.
constexpr int kCodeScoreRows = kLanes == 16 ? 8 : 4, kLeastScoreRows = 1;
constexpr int kCodeScoreVectors = kLanes == 4 ? 4 : 2;
constexpr int kCodeValueRows = 4;
constexpr int kCodeValueVectors = kWideFile ? 4 : 2;

// The codes of a tile's keys: in place, or, where a row is no whole groups, copied with zeros behind it.
Codes load_codes(const int8_t* codes, int D, int rows, int8_t* buffer) {
  const int width = kGroup * groups_of(D);
  if (width == D) return {codes, D};
  for (int n = 0; n < rows; ++n) {
    int8_t* row = buffer + (int64_t)n * width;
    memset(row + width - kGroup, 0, kGroup);
    memcpy(row, codes + (int64_t)n * D, (size_t)D);
  }
  return {buffer, width};
}

// Four rows, 16 dimensions from `d` on: out[d] gets a dimension's codes.
EDGE_QKV_INLINE void interleave(const int8_t* const* row, int d, Group* out) {
  Bits<4> all[4];
  interleave_four(row, d, all);
  memcpy(out + d, all, sizeof all);
}

// Where the weights of query row m are.
const uint32_t* weights_of(const uint32_t* weights, int, int m) { return weights + m; }

// The digits of four cache rows' weights, of L query rows: [2, query_pad], by digit.
template <int L>
EDGE_QKV_INLINE void store_digits(const Bits<L> (&high)[1], const Bits<L> (&low)[1], uint32_t* out,
                                  int query_pad) {
  store<L>(out, high[0]);
  store<L>(out + query_pad, low[0]);
}

// scores[n, m] of N rows and V vectors of query rows.
template <int L, int V, int N>
EDGE_QKV_INLINE void code_score_block(const int8_t* keys, int64_t stride, const Group* query, int groups,
                                      int query_pad, const uint32_t* offset, const float* key_scale,
                                      const float* query_scale, float* scores) {
  Bits<L> sum[N][V] = {};
  for (int digit = 0; digit < 2; ++digit) {
    for (int g = 0; g < groups; ++g) {
      Bits<L> q[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        q[v] = load<L>((const uint32_t*)query + (2 * g + digit) * (int64_t)query_pad + v * L);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const Bits<L> k = splat<L>(four_bytes(keys + n * stride + 4 * g));
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[n][v] = add_products(sum[n][v], q[v], k);
      }
    }
    if (digit == 0) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          sum[n][v] <<= 8;
          if constexpr (kDigitsAreUnsigned) sum[n][v] -= offset[n];
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const Float<L> scale = load<L>(query_scale + v * L);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Float<L> exact = __builtin_convertvector((Int<L>)sum[n][v], Float<L>);
      store<L>(scores + n * query_pad + v * L, exact * (scale * key_scale[n]));
    }
  }
}

// acc[m, d] = acc[m, d] * decay[m] + weight_scale[m] * sum over n of weights[n, m] * values[n, d], for M
// query rows and V vectors of d.
template <int M, int V>
EDGE_QKV_INLINE void code_value_block(const uint32_t* weights, int query_pad, const Group* values,
                                      int groups, const float* decay, const float* weight_scale,
                                      float* acc, int value_pad) {
  Bits<kLanes> sum[M][V] = {};
  for (int digit = 0; digit < 2; ++digit) {
    for (int g = 0; g < groups; ++g) {
      Bits<kLanes> x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        x[v] = load<kLanes>((const uint32_t*)values + (int64_t)g * value_pad + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Bits<kLanes> w = splat<kLanes>(weights[(2 * g + digit) * (int64_t)query_pad + m]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[m][v] = add_products(sum[m][v], w, x[v]);
      }
    }
    if (digit == 0) {
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[m][v] <<= 8;
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* at = acc + m * value_pad + v * kLanes;
      const Float<kLanes> exact = __builtin_convertvector((Int<kLanes>)sum[m][v], Float<kLanes>);
      store<kLanes>(at, load<kLanes>(at) * decay[m] + exact * weight_scale[m]);
    }
  }
}

#endif

}  // namespace
}  // namespace EDGE_QKV_ISA
}  // namespace edge_qkv
