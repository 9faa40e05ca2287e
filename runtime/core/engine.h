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
#include "core/plan.h"

namespace edge_qkv {

// How a cached row depends on the position it was written at.
enum class Positions : int {
  kNone = 0,             // not at all
  kLearned = 1,          // through the embedding: it cannot move
  kRotaryConjugate = 2,  // rotated when written: to move, it is rotated further
  kRotaryOnRead = 3,     // stored raw
};

struct ModelInfo {
  const char* engine = "";  // a literal: the name in the table of engines
  CacheLayout cache;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
  int64_t prefill_chunk = 0;  // most tokens of one forward; 0: any
  int64_t cache_rows = 0;  // of its tensors, fixed by the model file; 0: as many as a session asks for
  int64_t window = 0, sinks = 0;  // of the attention, see attention/attention.h
  Positions positions = Positions::kNone;
  int64_t rotary_dim = 0;   // with rotary positions
  double rotary_base = 0;   // with rotary positions
  std::string fingerprint;  // 64 hexadecimal digits: equal only where weights and graph are
  bool packed = false;      // of a loaded model: its weights are mapped from packed files
};

// What can be known before anything large is read.
struct ModelDescription {
  ModelInfo info;
  PlanModel plan;
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
  // `cache` has info().cache as its layout and, unless they are 0, info().cache_rows as its capacity.
  // The model and the memory outlive the state.
  virtual std::unique_ptr<EngineState> open(const CacheView& cache) const = 0;
};

}  // namespace edge_qkv
