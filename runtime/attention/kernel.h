// What the instruction-set independent half of the attention operator (attention.cpp) and the kernel
// (kernel.cpp, compiled once per instruction set) share.
//
// Only plain data and internal-linkage functions may live here: an inline
// function with external linkage would be emitted by every instruction
// set's object, and the linker could keep the AVX-512 copy for all.
#pragma once

#include "attention.h"

namespace edge_qkv {

// How a problem is cut up. A block is up to `block_rows` query rows of one batch entry and kv head;
// query row r of a kv head stands for token r / group and query head r % group. A tile is up to
// `tile_rows` cache rows, converted to fp32 once and used by every row of the block.
struct TilePlan {
  int group;       // query heads that share a kv head, H / G
  int dim_pad;     // D rounded up to whole vectors
  int value_pad;   // V rounded up to whole vectors
  int block_rows;  // at most this many query rows in a block
  int block_pad;   // block_rows rounded up to whole vectors
  int tile_rows;   // at most this many cache rows in a tile
};

// A task's scratch. All pointers are 64-byte aligned.
struct Scratch {
  float* query;    // [D, block_pad], or [block_rows, dim_pad] where a block is only a few rows
  float* scores;   // [tile_rows, block_pad], or [block_rows, tile_rows]
  float* keys;     // [tile_rows, dim_pad]
  float* values;   // [tile_rows, the larger of dim_pad and value_pad]
  float* acc;      // [block_rows, value_pad] sum of weights times values, not yet divided by row_sum
  float* row_max;  // [block_pad] largest score so far, in units of log2
  float* row_sum;  // [block_pad] sum of weights so far
  float* decay;    // [block_pad] factor that carries acc over to the newest row_max
  float* row;      // [the larger of dim_pad and value_pad] one row in flight
  // For products of integers, see int8.h:
  float* query_scale;   // [block_pad]
  float* weight_scale;  // [block_pad]
  float* tile_scales;   // [4, tile_rows]
  int32_t* from;        // [block_pad] first row of the tile that a query row sees
  int32_t* to;          // [block_pad] row of the tile behind the last one that it sees
};

struct RowRange {
  int64_t begin, end;  // rows [begin, end) of a cache; empty unless begin < end
};

// One piece of work: a block of query rows against two ranges of cache rows, of which each row is seen
// by some query row of the block: sinks, that is rows < AttentionParams::sinks, and rows beyond them.
struct WorkItem {
  int64_t batch;
  int64_t kv_head;
  int64_t first_row;  // first query row of the block, in [0, T*group)
  int rows;           // query rows in the block
  RowRange ranges[2];
};

// The result of a WorkItem that saw only part of the cache: [rows, V + 2], a row being V sums of weight
// times value, the largest score and the sum of weights.
inline constexpr int kPartialExtra = 2;

struct Kernel {
  const char* name;
  int lanes;  // floats in a vector

  // Writes the new rows of tokens [begin, end) of one batch entry and kv head into the cache.
  void (*append)(const AttentionParams& params, int64_t batch, int64_t kv_head, int64_t begin,
                 int64_t end, float* row);

  // Attends; writes the output rows, or the partial result where `partial` is not null.
  void (*attend)(const AttentionParams& params, const TilePlan& plan, const WorkItem& item,
                 const Scratch& scratch, float* partial);

  // Joins the partial results of all splits of a block, `stride` floats apart, in the order of the
  // splits and writes the output rows.
  void (*merge)(const AttentionParams& params, const TilePlan& plan, const WorkItem& item,
                const float* partial, int splits, size_t stride, float* row);

  // A row of `count` values of a kv head, as `attend` reads and `append` writes it; `scale` is null
  // unless the type is int8. `out` has room for whole vectors.
  void (*read_row)(CacheType type, const void* row, const uint16_t* scale, float* out, int64_t count);
  void (*write_row)(CacheType type, const float* in, void* row, uint16_t* scale, int64_t count);

  // IEEE half precision. To half: to nearest even, beyond the largest half saturates; see simd.h.
  void (*half_to_float)(const uint16_t* in, float* out, size_t count);
  void (*float_to_half)(const float* in, uint16_t* out, size_t count);
};

namespace baseline {
extern const Kernel kKernel;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernel kKernel;
}
namespace avxvnni {
extern const Kernel kKernel;
}
namespace avx512 {
extern const Kernel kKernel;
}
#elif defined(__aarch64__)
namespace armv8 {
extern const Kernel kKernel;
}
namespace dotprod {
extern const Kernel kKernel;
}
namespace i8mm {
extern const Kernel kKernel;
}
#endif

}  // namespace edge_qkv
