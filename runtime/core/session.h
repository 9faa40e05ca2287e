// One conversation: the tokens so far, the logits that follow them, and the engine's state behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cache.h"
#include "engine.h"
#include "overflow.h"
#include "plan.h"
#include "sampler.h"

namespace edge_qkv {

struct SessionOptions {
  int64_t context = 0;        // capacity in tokens
  int64_t prefill_chunk = 0;  // tokens evaluated at once; 0: kPrefillChunk
  OverflowOptions overflow = {};
  int64_t margin = 0;  // rows of windowed layers kept behind their window, for rewinds; 0: as many
};

// Told how many tokens of a total have been evaluated.
using Progress = std::function<void(int64_t done, int64_t total)>;

// Used by one thread at a time, except for `cancel`. Everything that can fail throws Error and leaves
// the session as it was, but for `evaluate`, which keeps the chunks that it finished, and so does a
// `rewind` that evaluates.
class Session {
 public:
  Session(std::shared_ptr<const EngineModel> model, const SessionOptions& options);

  // Appends tokens; logits [count, vocab_size] of all of them, or null. Tokens that do not fit are
  // refused as a whole, unless the overflow options say what to drop for them, chunk by chunk.
  void evaluate(const int32_t* tokens, size_t count, float* logits);

  // [vocab_size], of the token after the last; throws where the last change was not an evaluate.
  const float* logits() const;

  void set_sampler(const SamplerOptions& options) { sampler_ = Sampler(options); }
  int32_t sample();

  // Keeps the first `length` tokens. Where windowed layers have given rows back that these need, they
  // are evaluated again from the first on: returns how many were, 0 or `length`.
  int64_t rewind(int64_t length, const Progress& progress = nullptr);
  // Whether a rewind to `length` evaluates nothing.
  bool can_go_back_to(int64_t length) const {
    return length == this->length() || memory_.holds_visible(length);
  }

  // Keeps the first tokens that the session has in common with `tokens`, forgets the rest and returns
  // their number. All `count` are kept only where the session holds exactly these and their logits: else
  // at least one is left to evaluate. None are kept that a rewind would evaluate again.
  int64_t match(const int32_t* tokens, size_t count);

  // A session like this one, but for its sampler, that goes on by itself. The caches share their pages
  // until one writes to them; for that the rows are moved to a file in `directory`, or in memory where
  // it is empty or cannot take them.
  std::unique_ptr<Session> fork(const std::string& directory = "");

  // As a file, see snapshot.h. `restore` replaces tokens, rows and logits; where the file is refused the
  // session is as it was.
  void save(const std::string& path) const;
  void restore(const std::string& path);

  // Moves the rows to a file in `directory` until they are used again: none is in RAM afterwards.
  void spill(const std::string& directory) { memory_.spill(directory, length()); }

  void fill(int64_t length, uint64_t seed);
  void cancel();

  // Frees what is only needed during an evaluation.
  void release_workspace();

  const ModelInfo& model() const { return model_->info(); }
  const CacheMemory& cache() const { return memory_; }
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t context() const { return options_.context; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t dropped() const { return dropped_; }  // tokens, on overflow
  // The most that the rows of the first `length` tokens take in RAM.
  uint64_t cache_bytes(int64_t length) const;

 private:
  void check_fits(uint64_t more) const;
  void make_room(int64_t more);
  void check_vocabulary(const int32_t* tokens, size_t count) const;
  void forward(const int32_t* tokens, size_t count, float* logits);
  void evaluate_again(int64_t length, const Progress& progress);
  void stop_if_cancelled();

  const std::shared_ptr<const EngineModel> model_;
  const SessionOptions options_;  // no defaults left to fill in
  const Overflow overflow_;
  CacheMemory memory_;
  std::unique_ptr<EngineState> state_;  // over memory_
  std::vector<int32_t> tokens_;
  std::vector<float> logits_;       // [vocab_size]
  std::vector<float> next_logits_;  // where the engine writes them: it may stop half-way; or empty
  bool has_logits_ = false;
  int64_t dropped_ = 0;
  Sampler sampler_;

  std::mutex cancel_mutex_;  // keeps the flag and the engine's interrupt in step
  bool cancelled_ = false;
};

}  // namespace edge_qkv
