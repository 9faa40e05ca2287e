// The instruction-set independent half of the attention operator: validation, cutting the work up and
// handing it to tasks. The arithmetic is in kernel.cpp.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "cpu.h"

namespace edge_qkv {
namespace {

// A block of 64 query rows of head_dim 64 keeps queries, scores, sums and tile in 64 KiB: L2 of a small
// core. 32 rows of 576 take 72 KiB for queries and as much for sums; with fewer, more of the time goes
// into reading a tile than into its use. A tile of 64 rows of 64 is 16 KiB, half of a small L1. Where
// wider rows are used often, filling L1 costs less than the ends of tiles.
constexpr int kBlockFloats = 32 * 576;
constexpr int kMinBlockRows = 16, kMaxBlockRows = 64;
constexpr int kTileFloats = 4096, kManyRows = 32;
constexpr int kMinTileRows = 16, kMaxTileRows = 64;

// A cache is split only where there are fewer blocks than this, that is in decode and short prefills,
// and then into so many work items. Both are fixed, so that the arithmetic is the same on any number of
// threads, and bound the memory of partial results whatever the context.
constexpr int64_t kFewBlocks = 32;
constexpr int64_t kSplitItems = 64;
// There are as many splits as it takes of so many rows, doubled as often as kSplitItems asks, and then a
// multiple of kSplitsAtOnce, that two cores finish together. They are of equal size, up
// to whole tiles.
constexpr int64_t kSplitRows = 1024;
constexpr int64_t kSplitsAtOnce = 2;

// Keeps every int of a plan far from overflow; no published model comes near.
constexpr int kMaxHeadDim = 65536;

// New rows appended by one work item, and the number of values from which on appending is worth a
// parallel section of its own.
constexpr int64_t kAppendTokens = 16;
constexpr int64_t kParallelAppendValues = 1 << 16;

constexpr size_t kAlignment = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
T round_up(T x, T step) {
  return (x + step - 1) / step * step;
}

// How the call is cut up. A work item is a block of query rows against a split of the cache.
struct WorkPlan {
  TilePlan tile;
  int64_t query_rows;     // of one kv head, T * group
  int64_t head_blocks;    // blocks of one kv head
  int64_t blocks;         // of all batch entries and kv heads
  RowRange seen[2];       // cache rows that some query sees: sinks and the rest, see WorkItem
  int64_t splits;         // of these rows; 1 unless there are few blocks
  int64_t split_rows;     // rows in a split
  int64_t max_splits;     // the most splits that any `past` up to this one gives
  size_t partial_floats;  // [block_rows, V + 2]: a block's partial result
};

int64_t count(RowRange range) { return std::max<int64_t>(range.end - range.begin, 0); }

RowRange intersect(RowRange a, RowRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// The rows that the queries at positions [first, last] see, without those that none of them sees.
void find_seen(const AttentionParams& p, int64_t first, int64_t last, RowRange (&seen)[2]) {
  seen[0] = {0, std::min(p.sinks, last + 1)};
  seen[1] = {p.window == 0 ? 0 : std::max(p.sinks, first - p.window + 1), last + 1};
}

WorkPlan make_plan(const AttentionParams& p, int lanes) {
  WorkPlan plan;
  TilePlan& tile = plan.tile;
  tile.group = p.num_heads / p.kv_heads;
  tile.dim_pad = round_up(p.head_dim, lanes);
  tile.value_pad = round_up(p.value_dim, lanes);
  plan.query_rows = p.tokens * tile.group;
  int most = kMaxBlockRows;
  while (most > kMinBlockRows && most * std::max(tile.dim_pad, tile.value_pad) > kBlockFloats) most /= 2;
  tile.block_rows = static_cast<int>(std::min<int64_t>(most, plan.query_rows));
  tile.block_pad = round_up(tile.block_rows, lanes);
  const int tile_floats = tile.block_rows < kManyRows ? kTileFloats : 2 * kTileFloats;
  tile.tile_rows = std::clamp(tile_floats / tile.dim_pad / lanes * lanes, kMinTileRows, kMaxTileRows);

  plan.head_blocks = ceil_div(plan.query_rows, tile.block_rows);
  plan.blocks = p.batch * p.kv_heads * plan.head_blocks;
  find_seen(p, p.past, p.past + p.tokens - 1, plan.seen);
  const int64_t rows = count(plan.seen[0]) + count(plan.seen[1]);  // never shrinks as `past` grows
  plan.splits = plan.max_splits = 1;
  plan.split_rows = rows;
  if (plan.blocks < kFewBlocks && rows > kSplitRows) {
    const int64_t most_splits = kSplitItems / plan.blocks;
    const auto splits = [&](int64_t split_rows) {
      return std::min(round_up(ceil_div(rows, split_rows), kSplitsAtOnce), most_splits);
    };
    int64_t split_rows = kSplitRows;
    while (ceil_div(rows, split_rows) > most_splits) split_rows *= 2;
    plan.split_rows = round_up<int64_t>(ceil_div(rows, splits(split_rows)), tile.tile_rows);
    plan.splits = ceil_div(rows, plan.split_rows);
    plan.max_splits = splits(kSplitRows);
  }
  plan.partial_floats = static_cast<size_t>(tile.block_rows) * (p.value_dim + kPartialExtra);
  return plan;
}

// Hands out consecutive aligned pieces of a buffer; without one, only counts their bytes.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}

  template <class T>
  T* take(size_t count) {
    char* piece = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count * sizeof(T), kAlignment);
    return reinterpret_cast<T*>(piece);
  }

  size_t bytes() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

Scratch take_scratch(Arena& arena, const TilePlan& tile) {
  const size_t rows = tile.block_pad, cached = tile.tile_rows;
  const size_t dim = tile.dim_pad, wider = std::max(tile.dim_pad, tile.value_pad);
  Scratch s;
  s.query = arena.take<float>(rows * dim);
  s.scores = arena.take<float>(rows * cached);
  s.keys = arena.take<float>(cached * dim);
  s.values = arena.take<float>(cached * wider);
  s.acc = arena.take<float>(rows * tile.value_pad);
  s.row_max = arena.take<float>(rows);
  s.row_sum = arena.take<float>(rows);
  s.decay = arena.take<float>(rows);
  s.row = arena.take<float>(wider);
  s.query_scale = arena.take<float>(rows);
  s.weight_scale = arena.take<float>(rows);
  s.tile_scales = arena.take<float>(4 * cached);
  s.from = arena.take<int32_t>(rows);
  s.to = arena.take<int32_t>(rows);
  return s;
}

size_t scratch_bytes(const TilePlan& tile) {
  Arena arena(nullptr);
  take_scratch(arena, tile);
  return arena.bytes();
}

size_t partial_bytes(const WorkPlan& plan, int64_t splits) {
  if (splits == 1) return 0;
  return round_up(static_cast<size_t>(plan.blocks * splits) * plan.partial_floats * sizeof(float),
                  kAlignment);
}

// Tasks that can find work at any `past` up to this one.
size_t useful_tasks(const WorkPlan& plan, size_t tasks) {
  return std::clamp<size_t>(tasks, 1, static_cast<size_t>(plan.blocks * plan.max_splits));
}

// One call of the operator: what its tasks share. Tasks pull their work from counters, so that fast and
// slow cores finish together.
class Call {
 public:
  Call(const AttentionParams& params, const WorkPlan& plan, const Kernel& kernel, void* workspace)
      : params_(params), plan_(plan), kernel_(kernel), task_bytes_(scratch_bytes(plan.tile)) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(workspace);
    char* base = static_cast<char*>(workspace) + (round_up<uintptr_t>(address, kAlignment) - address);
    if (plan.splits > 1) partials_ = reinterpret_cast<float*>(base);
    scratch_ = base + partial_bytes(plan, plan.splits);
  }

  void run(size_t tasks, ThreadPool pool) {
    // The new rows must all be in place before anyone attends over them: two parallel sections, or one
    // after a short serial start. The rows of an earlier layer are.
    if (params_.key) {
      const int64_t appended = params_.batch * params_.tokens * params_.kv_heads * params_.head_dim;
      if (tasks > 1 && appended >= kParallelAppendValues) {
        parallel(tasks, pool, [](void* call, size_t task) { static_cast<Call*>(call)->append(task); });
      } else {
        append(0);
      }
    }
    parallel(tasks, pool, [](void* call, size_t task) { static_cast<Call*>(call)->attend(task); });
  }

 private:
  void parallel(size_t tasks, ThreadPool pool, void (*section)(void* call, size_t task)) {
    if (tasks > 1) {
      pool.parallel_for(pool.context, section, tasks, this);
    } else {
      section(this, 0);
    }
  }

  Scratch scratch(size_t task) const {
    Arena arena(scratch_ + task * task_bytes_);
    return take_scratch(arena, plan_.tile);
  }

  void append(size_t task) {
    const Scratch s = scratch(task);
    const int64_t pieces = ceil_div(params_.tokens, kAppendTokens);
    const int64_t items = params_.batch * params_.kv_heads * pieces;
    for (int64_t i; (i = next_append_.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const int64_t head = i / pieces, begin = i % pieces * kAppendTokens;
      kernel_.append(params_, head / params_.kv_heads, head % params_.kv_heads, begin,
                     std::min(begin + kAppendTokens, params_.tokens), s.row);
    }
  }

  void attend(size_t task) {
    const Scratch s = scratch(task);
    const int64_t items = plan_.blocks * plan_.splits;
    for (int64_t i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items;) {
      // From the last block to the first: later tokens see more rows, and the longest work goes first.
      const int64_t block = plan_.blocks - 1 - i / plan_.splits, split = i % plan_.splits;
      const int64_t head = block / plan_.head_blocks;
      const int64_t first_row = block % plan_.head_blocks * plan_.tile.block_rows;
      WorkItem item;
      item.batch = head / params_.kv_heads;
      item.kv_head = head % params_.kv_heads;
      item.first_row = first_row;
      item.rows =
          static_cast<int>(std::min<int64_t>(plan_.tile.block_rows, plan_.query_rows - first_row));
      cut_rows(split, &item);
      if (plan_.splits == 1) {
        kernel_.attend(params_, plan_.tile, item, s, nullptr);
        continue;
      }
      float* parts = partials_ + block * plan_.splits * plan_.partial_floats;
      kernel_.attend(params_, plan_.tile, item, s, parts + split * plan_.partial_floats);
      // Whoever completes a block joins its parts, in the order of the splits.
      if (splits_done_[block].fetch_add(1, std::memory_order_acq_rel) + 1 == plan_.splits) {
        kernel_.merge(params_, plan_.tile, item, parts, static_cast<int>(plan_.splits),
                      plan_.partial_floats, s.row);
      }
    }
  }

  // The rows of a split that the item's query rows see. Splits count the rows of both ranges in a row.
  void cut_rows(int64_t split, WorkItem* item) const {
    const int64_t first = params_.past + item->first_row / plan_.tile.group;
    const int64_t last = params_.past + (item->first_row + item->rows - 1) / plan_.tile.group;
    find_seen(params_, first, last, item->ranges);
    int64_t begin = split * plan_.split_rows;
    for (int i = 0; i < 2; ++i) {
      const RowRange all = plan_.seen[i];
      const int64_t from = all.begin + std::max<int64_t>(begin, 0);
      const int64_t to = all.begin + begin + plan_.split_rows;
      item->ranges[i] = intersect(item->ranges[i], {from, std::min(to, all.end)});
      begin -= count(all);
    }
  }

  const AttentionParams& params_;
  const WorkPlan& plan_;
  const Kernel& kernel_;
  const size_t task_bytes_;
  char* scratch_ = nullptr;    // [tasks, task_bytes]
  float* partials_ = nullptr;  // [blocks, splits, partial_floats] where the cache is split
  std::atomic<int64_t> next_append_{0};
  std::atomic<int64_t> next_item_{0};
  std::atomic<int64_t> splits_done_[kFewBlocks] = {};  // of each block
};

// Whether the product of the factors, none negative, fits what one buffer can hold.
bool fits_memory(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return false;
  }
  return product <= PTRDIFF_MAX;
}

}  // namespace

const char* attention_error(const AttentionParams& p) {
  if (p.batch < 1) return "batch must be at least 1.";
  if (p.tokens < 0) return "tokens must not be negative.";
  if (p.past < 0) return "past must not be negative.";
  if (p.capacity < 0) return "capacity must not be negative.";
  if (p.num_heads < 1) return "num_heads must be at least 1.";
  if (p.kv_heads < 1) return "kv_heads must be at least 1.";
  if (p.num_heads % p.kv_heads != 0) return "num_heads must be a multiple of kv_heads.";
  if (p.head_dim < 1) return "head_dim must be at least 1.";
  if (p.head_dim > kMaxHeadDim) return "head_dim must be at most 65536.";
  if (p.value_dim < 1) return "value_dim must be at least 1.";
  if (p.value_dim > kMaxHeadDim) return "value_dim must be at most 65536.";
  if (!std::isfinite(p.scale)) return "scale must be a finite number.";
  if (static_cast<size_t>(p.cache_type) >= std::size(kCacheTypes)) return "The cache type is unknown.";
  if (p.window < 0) return "window must not be negative.";
  if (p.sinks < 0) return "sinks must not be negative.";
  if (p.sinks > 0 && p.window == 0) return "sinks need a window.";
  if (p.tokens > p.capacity || p.past > p.capacity - p.tokens) {
    return "past + tokens exceeds the capacity of the cache.";
  }
  switch (p.rotary) {
    case Rotary::kNone:
      if (p.rotary_dim != 0) return "rotary_dim must be 0 without rotary positions.";
      if (p.rotary_offset != 0) return "rotary_offset must be 0 without rotary positions.";
      break;
    case Rotary::kConjugate:
    case Rotary::kOnRead:
      if (p.rotary_dim < 2) return "rotary_dim must be at least 2 with rotary positions.";
      if (p.rotary_dim % 2 != 0) return "rotary_dim must be even.";
      if (p.rotary_offset < 0) return "rotary_offset must not be negative.";
      if (p.rotary_offset > p.head_dim || p.rotary_dim > p.head_dim - p.rotary_offset) {
        return "rotary_offset + rotary_dim must not exceed head_dim.";
      }
      if (p.rotary_rows < 0) return "rotary_rows must not be negative.";
      if (p.past + p.tokens > p.rotary_rows) {
        return "past + tokens exceeds the rows of the rotary tables.";
      }
      if (!fits_memory({p.rotary_rows, p.rotary_dim / 2, sizeof(float)})) {
        return "The rotary tables exceed the address space.";
      }
      break;
    default:
      return "The rotary mode is unknown.";
  }
  const int64_t wider = std::max(p.head_dim, p.value_dim);
  if (!fits_memory({p.batch, p.tokens, p.num_heads, wider + kPartialExtra, sizeof(float)})) {
    return "The query or the output exceeds the address space.";
  }
  const int64_t row_bytes =
      wider * cache_value_bytes(p.cache_type) + cache_type_info(p.cache_type).scale_bytes;
  if (!fits_memory({p.batch, p.kv_heads, p.capacity, row_bytes})) {
    return "The cache exceeds the address space.";
  }
  if (p.tokens == 0) return nullptr;  // Engines give empty tensors no memory.
  if (p.key && (p.value == nullptr) != (p.value_cache == nullptr)) {
    return "value and value_cache must both be given, or neither.";
  }
  if (!p.key && p.value) return "value must be null where no key is written.";
  if (!p.value_cache) {
    if (p.value_dim > p.head_dim) return "value_dim must not exceed head_dim in unified rows.";
    if (p.rotary == Rotary::kConjugate && p.rotary_offset < p.value_dim &&
        p.rotary_dim > p.value_dim - p.rotary_offset) {
      return "The rotated part of a unified row must lie in its value or behind it.";
    }
  }
  if (p.key_weight && p.value_cache) return "key_weight needs unified rows.";
  if (p.key_weight && p.rotary == Rotary::kConjugate) {
    return "key_weight needs rows that are stored as they are, not rotated.";
  }
  if (!p.query) return "query is null.";
  if (!p.key_cache) return "key_cache is null.";
  if (!p.output) return "output is null.";
  const bool scaled = cache_type_info(p.cache_type).scale_bytes > 0;
  if ((p.key_scales != nullptr) != scaled) return "key_scales go with an int8 cache, and only with it.";
  if ((p.value_scales != nullptr) != (scaled && p.value_cache)) {
    return "value_scales go with an int8 cache of separate values, and only with it.";
  }
  if (p.rotary != Rotary::kNone && (!p.cos || !p.sin)) return "A rotary table is null.";
  return nullptr;
}

size_t attention_workspace_bytes(const AttentionParams& params, size_t tasks) {
  if (params.tokens == 0) return 0;
  const WorkPlan plan = make_plan(params, active_kernel().lanes);
  return kAlignment - 1 + partial_bytes(plan, plan.max_splits) +
         useful_tasks(plan, tasks) * scratch_bytes(plan.tile);
}

void attention(const AttentionParams& params, void* workspace, size_t tasks, ThreadPool pool) {
  if (params.tokens == 0) return;
  AttentionParams p = params;
  p.window = std::min(p.window, p.capacity);  // the same sight, in numbers that can be added to rows
  p.sinks = std::min(p.sinks, p.capacity);
  const Kernel& kernel = active_kernel();
  const WorkPlan plan = make_plan(p, kernel.lanes);
  Call(p, plan, kernel, workspace).run(useful_tasks(plan, tasks), pool);
}

}  // namespace edge_qkv
