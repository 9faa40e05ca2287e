// Dropping rows out of the middle of a cache, for contexts that go on when they are full.
#pragma once

#include <cstdint>

#include "cache.h"
#include "engines/engine.h"

namespace edge_qkv {

// Throws Error where the rows of such a model cannot move: what a learned position has put into a row
// stays there, and the model would see two tokens at one position.
void check_rows_can_move(const ModelInfo& model);

// Drops rows [first, last) of `length`: those after them move up, rotated to their new positions where
// they were rotated when they were written. A row then is what it would have been, had it been written
// there; it is rounded to the cache's type once more.
void drop_rows(const CacheView& view, const ModelInfo& model, int64_t first, int64_t last,
               int64_t length);

}  // namespace edge_qkv
