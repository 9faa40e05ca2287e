// The unified-KV attention operator: write the new rows into the cache, then attend over it.
//
// This is the only kernel contract of the runtime. Every engine calls `attention` with plain pointers;
// nothing here knows an engine, a thread pool or a file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edge_qkv {

// kInt8: a row of one kv head is codes in [-127, 127] and a scale, a 127th of
// the row's largest magnitude as fp16 (to nearest, at most 65504). A code is
// the value divided by that fp16 scale, to nearest even; it stands for code *
// scale. A scale that is 0 in fp16 makes all codes 0. NaN counts as 0.
enum class CacheType : int { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

// Everything about the types in one place: index it with static_cast<int>(type).
struct CacheTypeInfo {
  const char* name;
  int64_t value_bytes;  // of one cached value
  int64_t scale_bytes;  // of what a row of one kv head carries beside its values
};
inline constexpr CacheTypeInfo kCacheTypes[] = {{"fp32", 4, 0}, {"fp16", 2, 0}, {"int8", 1, 2}};

constexpr const CacheTypeInfo& cache_type_info(CacheType type) {
  return kCacheTypes[static_cast<int>(type)];
}
constexpr int64_t cache_value_bytes(CacheType type) { return cache_type_info(type).value_bytes; }

// How rotary positions meet the cache. The R = rotary_dim values of a row from O = rotary_offset on are
// rotated in half-split pairs (O + i, O + R/2 + i).
enum class Rotary : int {
  kNone = 0,
  // Unified: the row is rotated when it is written and the output, where it holds the rotated values, is
  // rotated back by the query's own position. With a separate V: the key row is rotated when it is
  // written, V is left alone.
  kConjugate = 1,
  // The row is stored raw; keys are weighted and rotated tile by tile as they are read, values are not.
  kOnRead = 2,
};

// Shapes use B batch, T new tokens, H query heads, G kv heads (H % G == 0), D head_dim, V value_dim, C
// capacity. A value is the first V values of the row that is its key as well (unified, V <= D), or a row
// of V values of its own. The T new rows become rows [past, past + T) of the cache; the query at
// position past + t sees rows <= past + t, and of those, with a window of W > 0 rows and S sinks, only
// rows < S and rows > past + t - W: itself, the W - 1 rows before it, and the first S.
struct AttentionParams {
  int64_t batch = 1;
  int64_t tokens = 0;
  int64_t past = 0;
  int64_t capacity = 0;
  int num_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;   // D: of a query and of a key
  int value_dim = 0;  // V: of a value and of what a head gives
  float scale = 0.0f;
  Rotary rotary = Rotary::kNone;
  int rotary_dim = 0;          // R: even; 0 without rotary
  int rotary_offset = 0;       // O: O + R <= D; unified and conjugate, O + R <= V or O >= V
  int64_t rotary_rows = 0;     // P: positions the tables hold
  const float* cos = nullptr;  // [P, R/2]
  const float* sin = nullptr;  // [P, R/2]
  int64_t window = 0;          // rows a query sees, itself included; 0: all
  int64_t sinks = 0;           // first rows that every query sees besides; 0 without a window
  CacheType cache_type = CacheType::kFloat16;
  const float* query = nullptr;  // [B, T, H*D]
  // [B, T, G*D]: keys, or unified rows. Null where the cache belongs to an earlier layer, which has
  // written these tokens' rows already: then none are written.
  const float* key = nullptr;
  const float* value = nullptr;  // [B, T, G*V]; null when unified, or where key is null
  // [D]: keys are weight * row; or null. Unified, not with kConjugate.
  const float* key_weight = nullptr;
  void* key_cache = nullptr;         // [B, G, C, D] of cache_type
  void* value_cache = nullptr;       // [B, G, C, V], or null when unified
  uint16_t* key_scales = nullptr;    // [B, G, C] fp16, or null unless the cache is int8
  uint16_t* value_scales = nullptr;  // [B, G, C] fp16, or null unless it is int8 and not unified
  float* output = nullptr;           // [B, T, H*V]
};

// Runs fn(arg, i) for every i in [0, count), on as many threads as the caller has; returns when all are
// done. The engine passes its own thread pool, so that the kernel never starts a thread.
struct ThreadPool {
  void (*parallel_for)(void* context, void (*fn)(void* arg, size_t index), size_t count, void* arg);
  void* context;
};

// One sentence that says what is wrong with the parameters, or null when they are sound. Everything
// that comes from a file is checked here: heads, shapes, past + tokens <= capacity, table length,
// overflow of any byte count.
const char* attention_error(const AttentionParams& params);

// Bytes of scratch that `attention` needs when its work is spread over at most `tasks` tasks. Does not
// grow with capacity beyond the partial results of a split cache (B*T*H*(V+2) floats a split).
size_t attention_workspace_bytes(const AttentionParams& params, size_t tasks);

// Precondition: attention_error(params) == nullptr; workspace holds attention_workspace_bytes(params,
// tasks) bytes (any alignment). The result does not depend on `tasks` or on the thread pool.
void attention(const AttentionParams& params, void* workspace, size_t tasks, ThreadPool pool);

// Name of the instruction set in use: "baseline", "avx2", "avxvnni", "avx512", "armv8", "dotprod" or
// "i8mm". Chosen once, at first use, from what the processor has; the environment variable EDGE_QKV_ISA
// forces one. A forced choice that the processor or the build lacks is reported by isa_error() and the
// best available one is used.
const char* isa_name();
const char* isa_error();

}  // namespace edge_qkv
