// One conversation: the tokens so far, the logits that follow them, and the engine's state behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cache.h"
#include "engines/engine.h"
#include "plan.h"
#include "sampler.h"

namespace edge_qkv {

struct SessionOptions {
  int64_t context = 0;        // capacity in tokens
  int64_t prefill_chunk = 0;  // tokens evaluated at once; 0: kPrefillChunk
};

// Used by one thread at a time, except for `cancel`. Everything that can fail throws Error and leaves
// the session as it was, but for `evaluate`, which keeps the chunks that it finished.
class Session {
 public:
  Session(std::shared_ptr<const EngineModel> model, const SessionOptions& options);

  // Appends tokens; logits [count, vocab_size] of all of them, or null.
  void evaluate(const int32_t* tokens, size_t count, float* logits);

  // [vocab_size], of the token after the last; throws where the last change was not an evaluate.
  const float* logits() const;

  void set_sampler(const SamplerOptions& options) { sampler_ = Sampler(options); }
  int32_t sample();

  void rewind(int64_t length);
  void fill(int64_t length, uint64_t seed);
  void cancel();

  const ModelInfo& model() const { return model_->info(); }
  const CacheMemory& cache() const { return memory_; }
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t context() const { return context_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  void check_fits(uint64_t more) const;
  void check_vocabulary(const int32_t* tokens, size_t count) const;
  void forward(const int32_t* tokens, size_t count, float* logits);
  void stop_if_cancelled();

  const std::shared_ptr<const EngineModel> model_;
  const int64_t context_;
  const int64_t chunk_;
  CacheMemory memory_;
  std::unique_ptr<EngineState> state_;  // over memory_
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;       // [vocab_size]
  std::vector<float> next_logits_;  // where the engine writes them: it may stop half-way
  bool has_logits_ = false;
  Sampler sampler_;

  std::mutex cancel_mutex_;  // keeps the flag and the engine's interrupt in step
  bool cancelled_ = false;
};

}  // namespace edge_qkv
