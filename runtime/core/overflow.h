// What happens when tokens do not fit into a session's context: rows are dropped out of its cache.
#pragma once

#include <cstdint>

#include "cache.h"
#include "edge_qkv.h"
#include "engine.h"

namespace edge_qkv {

// Fields as in eqkv_session_options.
struct OverflowOptions {
  eqkv_overflow policy = EQKV_OVERFLOW_ERROR;
  int64_t sinks = 0;
  int64_t window = 0;
  int64_t block = 0;
};

class Overflow {
 public:
  // Throws Error for options that contradict each other, the context or the model: a row that carries a
  // learned position cannot move, for the model would see two tokens at one position; and where windows
  // differ, none may be left so few tokens that the sinks move into it.
  Overflow(const OverflowOptions& options, const ModelInfo& model, int64_t context);

  bool drops() const { return options_.policy != EQKV_OVERFLOW_ERROR; }
  // The most tokens that can be evaluated at once, whatever the session holds.
  int64_t most_tokens() const;

  // Rows [first, last) to drop so that `more` rows fit behind the `length` that are there.
  RowSpan rows_to_drop(int64_t length, int64_t more) const;

  const OverflowOptions& options() const { return options_; }

 private:
  OverflowOptions options_;  // with the defaults filled in
  const int64_t context_;
};

// Drops rows [dropped.begin, dropped.end) of `length`: the live ones after them move up, rotated to
// their new positions where they were rotated when they were written. A row then is what it would have
// been, had it been written there; it is rounded to the cache's type once more.
void drop_rows(CacheMemory& memory, const Description& model, RowSpan dropped, int64_t length);

}  // namespace edge_qkv
