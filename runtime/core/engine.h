// What the runtime needs of an inference engine, and no more.
//
// A Model is loaded once and read by many threads. A State evaluates one conversation over caches that
// the session owns, and is used by one thread at a time except for `interrupt`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/cache.h"
#include "core/description.h"

namespace edge_qkv {

// A model as its file describes it: what can be known before anything large is read.
struct ModelInfo {
  const char* engine = "";  // a literal: the name in the table of engines
  std::string path;         // of its model file
  std::string text;         // the description as the file has it
  Description description;  // what it says
  CacheLayout layout;       // the tensors of a session
  std::string fingerprint;  // 64 hexadecimal digits: equal only where weights and graph are
  uint64_t file_bytes = 0;  // of the model's files
  bool packed = false;      // of a loaded model: its weights are mapped from packed files
};

class EngineState {
 public:
  virtual ~EngineState() = default;

  // Evaluates tokens [T] as positions [past, past + T), whose rows it writes into the caches, and writes
  // the logits of the last R of them to logits [R, vocab_size], 1 <= R <= T. Tokens, past and R are
  // checked by the caller, the model's prefill_chunk included. Throws Error; rows >= past are then
  // undefined, rows < past unharmed.
  virtual void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
                       float* logits) = 0;

  // Makes a `forward` that is running in another thread stop with an Error as soon as it can, and every
  // later one until `resume`.
  virtual void interrupt() noexcept = 0;
  virtual void resume() noexcept = 0;
};

class EngineModel {
 public:
  virtual ~EngineModel() = default;
  virtual const ModelInfo& info() const = 0;
  // Gives back what an evaluation has used and the next one would write anew: not while one runs, whose
  // end it does not wait for. An engine that keeps none has nothing to do.
  virtual void release_workspace() const {}
  // Lets go of pages of weights that can be read from their files again.
  virtual void release_pages() const = 0;
  // `cache` has info().layout and, unless they are 0, the description's cache_rows as its capacity. The
  // model and the memory outlive the state.
  virtual std::unique_ptr<EngineState> open(const CacheView& cache) const = 0;
};

}  // namespace edge_qkv
