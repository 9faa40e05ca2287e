// How much memory a model and one session of it will take, from numbers alone.
//
// Everything that is budgeted is computed here, before a weight is read. What only an engine can know
// comes in as EngineCosts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "description.h"

namespace edge_qkv {

struct PlanOptions {
  uint64_t memory = 0;        // budget in bytes; 0: none
  int64_t context = 0;        // tokens; 0: the longest that the budget holds
  int64_t prefill_chunk = 0;  // tokens evaluated at once; 0: kPrefillChunk
  int64_t margin = 0;         // rows of a windowed layer kept behind its window; 0: as many as that
  int threads = 1;
  bool packed = false;  // the weights are mapped in the form that the engine computes with
};

constexpr int64_t kPrefillChunk = 128;

// Tokens evaluated at once where `asked` are asked for (0: kPrefillChunk), the model takes at most
// `most` (0: any number) and the context holds `context`.
inline int64_t chunk_tokens(int64_t asked, int64_t most, int64_t context) {
  const int64_t chunk = std::min(asked == 0 ? kPrefillChunk : asked, context);
  return most == 0 ? chunk : std::min(chunk, most);
}

// Bytes beyond what the process has without the runtime.
struct EngineCosts {
  uint64_t weights_file = 0;       // pages of files
  uint64_t weights_anonymous = 0;  // copies in a form of its own
  uint64_t workspace = 0;          // of one evaluation of a chunk, attention and logits excepted
  uint64_t code = 0;               // pages of its library
  uint64_t structures = 0;         // what it allocates beside the weights, and its threads
  uint64_t loading = 0;            // while it loads, beside its weights and structures
  uint64_t margin = 0;             // what measurements differ by,
  uint64_t margin_share = 100;     // and besides, one part in so many
};

// How an engine counts. Both are given sound models and options without zeros, the context excepted.
struct PlanEngine {
  EngineCosts (*costs)(const Description& model, const PlanOptions& options);
  Description (*in_int4)(const Description& model);  // the same model exported with int4 weights
  bool row_scales = false;  // a matrix of 8 bits may have a scale a row, and its model block_size 0
};

struct Plan {
  int64_t context = 0;
  int64_t prefill_chunk = 0;
  int threads = 1;
  CacheType cache_type = CacheType::kFloat16;
  uint64_t weights_file = 0, weights_anonymous = 0, cache = 0;
  // Of an evaluation; more where loading needs more than the full cache and that.
  uint64_t workspace = 0;
  uint64_t engine_file = 0, engine_anonymous = 0;
  uint64_t margin = 0;
  uint64_t all_caches = 0;  // what a budget leaves for the caches of all sessions: at least `cache`
  std::string over_budget;  // one sentence or more, where the budget does not hold it; else empty

  uint64_t expected() const {
    return weights_file + weights_anonymous + cache + workspace + engine_file + engine_anonymous;
  }
  uint64_t total() const { return expected() + margin; }
  uint64_t anonymous() const {
    return weights_anonymous + cache + workspace + engine_anonymous + margin;
  }
};

// Throws Error with EQKV_INVALID_ARGUMENT for options out of range, and for a model that the engine does
// not have. A plan that the budget does not hold is returned, with `over_budget` set; for context 0 it
// is then that of one token.
Plan plan_memory(const Description& model, const PlanOptions& options, const PlanEngine& engine);

}  // namespace edge_qkv
