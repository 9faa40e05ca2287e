// What the runtime needs of an inference engine, and no more.
//
// A Model is loaded once and read by many threads. A State is one conversation: it owns the caches,
// because some engines keep them inside the program, and is used by one thread at a time except for
// `interrupt`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/cache.h"

namespace edge_qkv {

struct ModelInfo {
  const char* engine = "";  // a literal
  CacheType cache_type = CacheType::kFloat16;
  int64_t vocab_size = 0;
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t caches = 1;  // tensors a layer: 1 unified, 2 with a separate V
  int64_t max_positions = 0;

  int64_t cache_bytes_per_token() const {
    return layers * caches * kv_heads * head_dim * cache_value_bytes(cache_type);
  }
};

class EngineState {
 public:
  virtual ~EngineState() = default;

  // Evaluates tokens [T] as positions [past, past + T), whose rows it writes into the caches, and writes
  // the logits of the last R of them to logits [R, vocab_size], 1 <= R <= T. Tokens, past and R are
  // checked by the caller. Throws Error; rows >= past are then undefined, rows < past unharmed.
  virtual void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
                       float* logits) = 0;

  // Makes a `forward` that is running in another thread stop with an Error as soon as it can, and every
  // later one until `resume`.
  virtual void interrupt() noexcept = 0;
  virtual void resume() noexcept = 0;

  virtual const CacheView& cache() const = 0;
  virtual size_t cache_reserved() const = 0;
  virtual size_t cache_committed() const = 0;
  // Rows [length, C) are no longer needed.
  virtual void release(int64_t length) = 0;
};

class EngineModel {
 public:
  virtual ~EngineModel() = default;
  virtual const ModelInfo& info() const = 0;
  // `capacity` in tokens, in [1, max_positions]. The model outlives its states.
  virtual std::unique_ptr<EngineState> open(int64_t capacity) const = 0;
};

struct EngineOptions {
  std::string library;  // path of the engine's shared library; empty: the system's search path
  int threads = 0;      // 0: one for each core
};

// Opens the package directory or model file at `path` with the engine it was exported for.
std::unique_ptr<EngineModel> open_model(const std::string& path, const EngineOptions& options);

}  // namespace edge_qkv
