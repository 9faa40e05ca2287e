// The plan's arithmetic and its one message, on an engine whose costs can be seen through.
#include "core/plan.h"

#include <cstdint>
#include <string>

#include "engines/engines.h"
#include "test.h"

using namespace edge_qkv;

namespace {

constexpr uint64_t kMB = 1'000'000;

EngineCosts plain_costs(const Description& m, const PlanOptions& options) {
  EngineCosts costs;
  // As if packing saved half.
  costs.weights_file = m.table_bytes + (options.packed ? m.matrix_bytes / 2 : 0);
  costs.weights_anonymous = options.packed ? 0 : m.matrix_bytes;
  costs.workspace = static_cast<uint64_t>(options.prefill_chunk) * 100'000;
  costs.code = 20 * kMB;
  costs.structures = 10 * kMB;
  costs.margin = 3 * kMB;
  costs.margin_share = 1'000'000'000;
  return costs;
}

Description eighth(const Description& m) {
  Description changed = m;
  changed.weight_bits = 4;
  changed.block_size = 128;
  changed.matrix_bytes /= 8;
  return changed;
}

constexpr PlanEngine kPlain = {plain_costs, eighth};

// 22 layers of one kv head of 64: 2,816 bytes a token in fp16.
Description model() {
  Description m;
  LayerKind kind;
  kind.name = "layer";
  kind.heads = 32;
  kind.kv_heads = 1;
  kind.head_dim = kind.value_dim = 64;
  kind.mlp_width = 8192;
  m.kinds = {kind};
  m.pattern.assign(22, 0);
  m.width = 2048;
  m.vocab_size = 50'304;
  m.max_positions = 32'768;
  m.matrix_bytes = 800 * kMB;
  m.table_bytes = 100 * kMB;
  m.weight_bits = 8;
  m.block_size = 128;
  return m;
}

// The same with five layers that see 512 rows and 4 sinks for each that sees all.
Description with_windows() {
  Description m = model();
  m.kinds.push_back(m.kinds[0]);
  m.kinds[1].window = 512;
  m.kinds[1].sinks = 4;
  for (size_t i = 0; i < m.pattern.size(); ++i) m.pattern[i] = i % 6 == 5 ? 0 : 1;
  return m;
}

PlanOptions with(uint64_t memory, int64_t context, int64_t chunk = 0) {
  PlanOptions options;
  options.memory = memory;
  options.context = context;
  options.prefill_chunk = chunk;
  return options;
}

bool says(const Plan& plan, const std::string& words) {
  return plan.over_budget.find(words) != std::string::npos;
}

}  // namespace

TEST(exact_cache, "the cache is exact in every type, scales included") {
  Description m = model();
  EXPECT(plan_memory(m, with(0, 32'768), kPlain).cache == 92'274'688);
  m.cache = CacheType::kFloat32;
  EXPECT(plan_memory(m, with(0, 32'768), kPlain).cache == 184'549'376);
  m.cache = CacheType::kInt8;
  EXPECT(plan_memory(m, with(0, 32'768), kPlain).cache == 22 * (64 + 2) * uint64_t{32'768});
}

TEST(sums, "the parts add up, and what a file backs is not anonymous") {
  const Plan p = plan_memory(model(), with(0, 1000, 10), kPlain);
  EXPECT(p.weights_file == 100 * kMB && p.weights_anonymous == 800 * kMB);
  EXPECT(p.workspace > 1 * kMB && p.workspace < 5 * kMB);
  EXPECT(p.expected() == 930 * kMB + p.cache + p.workspace);
  EXPECT(p.total() == p.expected() + 3 * kMB);
  EXPECT(p.total() - p.anonymous() == 120 * kMB);
}

TEST(monotonic, "more context or a larger chunk never needs less") {
  uint64_t last = 0;
  for (int64_t context = 1; context <= 32'768; context += context < 600 ? 1 : 517) {
    const uint64_t total = plan_memory(model(), with(0, context), kPlain).total();
    EXPECT(total >= last);
    last = total;
  }
  last = 0;
  for (int64_t chunk = 1; chunk <= 4096; chunk *= 2) {
    const uint64_t total = plan_memory(model(), with(0, 32'768, chunk), kPlain).total();
    EXPECT(total > last);
    last = total;
  }
}

TEST(inverse, "the longest context of a budget and the least budget of a context are inverse") {
  for (const int64_t context :
       {int64_t{1}, int64_t{127}, int64_t{129}, int64_t{5000}, int64_t{32'767}}) {
    const uint64_t least = plan_memory(model(), with(0, context), kPlain).total();
    EXPECT(plan_memory(model(), with(least, context), kPlain).over_budget.empty());
    EXPECT(plan_memory(model(), with(least, 0), kPlain).context == context);
    EXPECT(!plan_memory(model(), with(least - 1, context), kPlain).over_budget.empty());
    const Plan below = plan_memory(model(), with(least - 1, 0), kPlain);
    EXPECT(context == 1 ? !below.over_budget.empty() : below.context == context - 1);
  }
  EXPECT(plan_memory(model(), with(0, 0), kPlain).context == 32'768);
  EXPECT(plan_memory(model(), with(UINT64_MAX, 0), kPlain).context == 32'768);
}

TEST(changes, "the message names need, budget, shortfall and every change that fits alone") {
  const uint64_t total = plan_memory(model(), with(0, 32'768), kPlain).total();
  const Plan small = plan_memory(model(), with(total - 1, 32'768), kPlain);
  EXPECT(says(small, "A context of 32768 tokens needs ") && says(small, " are allowed: 0.1 MB short."));
  for (const char* change : {"an int8 cache (", "a context of 32767 tokens (", "a prefill chunk of 64 (",
                             "int4 weights (", " or packed weights ("}) {
    EXPECT(says(small, change));
  }
  // 60 MB short: int8 saves 44.7, no chunk saves more than 13.
  const Plan more = plan_memory(model(), with(total - 60 * kMB, 32'768), kPlain);
  EXPECT(!says(more, "int8") && !says(more, "chunk"));
  EXPECT(says(more, "a context of ") && says(more, "int4 weights (") && says(more, "packed weights ("));
  // A change that was made is not proposed.
  Description int8 = model();
  int8.cache = CacheType::kInt8;
  PlanOptions packed = with(1, 32'768);
  packed.memory = plan_memory(int8, with(0, 32'768), kPlain).total() - 401 * kMB;
  packed.packed = true;
  const Plan both = plan_memory(int8, packed, kPlain);
  EXPECT(!says(both, "int8") && !says(both, "packed"));
}

TEST(each_change_holds, "a context or chunk that the message proposes does fit") {
  const uint64_t total = plan_memory(model(), with(0, 32'768), kPlain).total();
  const uint64_t budget = total - 10 * kMB;
  const Plan refused = plan_memory(model(), with(budget, 32'768), kPlain);
  const auto figure = [&](const std::string& before) {
    return std::stoll(refused.over_budget.substr(refused.over_budget.find(before) + before.size()));
  };
  const int64_t context = figure("fit: an int8 cache (");
  EXPECT(context > 0 && static_cast<uint64_t>(context) * kMB <= budget);
  EXPECT(plan_memory(model(), with(budget, figure("), a context of ")), kPlain).over_budget.empty());
  const int64_t chunk = figure("a prefill chunk of ");
  EXPECT(plan_memory(model(), with(budget, 32'768, chunk), kPlain).over_budget.empty());
  EXPECT(!plan_memory(model(), with(budget, 32'768, chunk * 2), kPlain).over_budget.empty());
}

TEST(nothing_fits, "where no change fits, the message says what one token needs") {
  const Plan p = plan_memory(model(), with(50 * kMB, 32'768), kPlain);
  EXPECT(says(p, " are needed, for a context of 1 token."));
  EXPECT(!says(p, "What would fit"));
  EXPECT(plan_memory(model(), with(50 * kMB, 0), kPlain).context == 1);
}

TEST(unsound, "numbers that no request has are refused, and none overflows") {
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "context", plan_memory(model(), with(0, 32'769), kPlain));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "context", plan_memory(model(), with(0, -1), kPlain));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "prefill_chunk",
               plan_memory(model(), with(0, 1, INT64_MAX), kPlain));
  for (const int64_t margin : {int64_t{-1}, INT64_MAX}) {
    PlanOptions options = with(0, 1);
    options.margin = margin;
    EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "margin", plan_memory(with_windows(), options, kPlain));
  }
  Description huge = model();
  huge.cache = CacheType::kFloat32;
  LayerKind& kind = huge.kinds[0];
  kind.rows = Rows::kSeparate;
  kind.heads = kind.kv_heads = 4096;
  kind.head_dim = kind.value_dim = 65'536;
  huge.pattern.assign(4096, 0);
  huge.max_positions = int64_t{1} << 31;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "more bytes than exist",
               plan_memory(huge, with(0, huge.max_positions), kPlain));
}

TEST(fixed_chunk, "the chunk is the least of what is asked for, the model takes and the context holds") {
  Description m = model();
  const auto planned = [&](int64_t context, int64_t chunk) {
    return plan_memory(m, with(0, context, chunk), kPlain).prefill_chunk;
  };
  EXPECT(planned(1000, 0) == kPrefillChunk && planned(1000, 600) == 600 && planned(50, 600) == 50);
  m.prefill_chunk = 64;
  EXPECT(planned(1000, 0) == 64 && planned(1000, 600) == 64 && planned(1000, 40) == 40);
  EXPECT(planned(50, 0) == 50);
  EXPECT(plan_memory(m, with(0, 1000), kPlain).total() ==
         plan_memory(model(), with(0, 1000, 64), kPlain).total());
  // What is proposed is less than what the model would do anyway.
  const uint64_t total = plan_memory(m, with(0, 32'768), kPlain).total();
  EXPECT(says(plan_memory(m, with(total - 1, 32'768), kPlain), "a prefill chunk of 32 ("));
  m.prefill_chunk = 1000;
  EXPECT(planned(2000, 0) == kPrefillChunk);
}

TEST(engines, "each engine's own figures: packed weights are file-backed, int4 is smaller") {
  for (const char* name : {"onnxruntime", "executorch"}) {
    const PlanEngine& engine = plan_engine(name);
    Description wide = model();
    wide.weight_bits = 32;
    wide.block_size = 0;
    wide.matrix_bytes = 3200 * kMB;
    wide.table_bytes = 412 * kMB;
    for (const Description& m : {model(), wide}) {
      PlanOptions options = with(0, 1024);
      const Plan plain = plan_memory(m, options, engine);
      options.packed = true;
      const Plan packed = plan_memory(m, options, engine);
      EXPECT(packed.weights_anonymous == 0 && plain.weights_anonymous >= m.matrix_bytes);
      EXPECT(packed.weights_file - plain.weights_file == plain.weights_anonymous);
      EXPECT(packed.total() == plain.total());
      const Description int4 = engine.in_int4(m);
      EXPECT(int4.weight_bits == 4 && int4.block_size >= 32);
      EXPECT(int4.matrix_bytes < m.matrix_bytes * 7 / 10 && int4.matrix_bytes > m.matrix_bytes / 8);
      EXPECT(plan_memory(int4, options, engine).total() < packed.total());
    }
  }
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "onnxruntime or executorch, not \"llama\"", plan_engine("llama"));
}

TEST(weight_bits, "weights of every width that a description has are planned for by both engines") {
  for (const char* name : {"onnxruntime", "executorch"}) {
    Description m = model();
    uint64_t last = 0;
    for (const int bits : {4, 8, 16, 32}) {
      m.weight_bits = bits;
      m.block_size = bits < 16 ? 128 : 0;
      m.matrix_bytes = static_cast<uint64_t>(bits) * 100 * kMB;
      EXPECT(!plan_memory(m, with(1, 1024), plan_engine(name)).over_budget.empty());
      const uint64_t total = plan_memory(m, with(0, 1024), plan_engine(name)).total();
      EXPECT(total > last);
      last = total;
    }
  }
}

TEST(row_scales, "8 bits with a scale a row are for the engine that has them") {
  Description m = model();
  m.block_size = 0;
  const Plan plan = plan_memory(m, with(0, 1024), plan_engine("executorch"));
  EXPECT(plan.weights_anonymous >= m.matrix_bytes && plan.over_budget.empty());
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "block_size",
               plan_memory(m, with(0, 1024), plan_engine("onnxruntime")));
  m.weight_bits = 4;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "block_size",
               plan_memory(m, with(0, 1024), plan_engine("executorch")));
}

TEST(windows, "layers with a window take no more than it, its margin, the sinks and a chunk") {
  const Description m = with_windows();
  const uint64_t row = 128, global = 3 * row, local = 19 * row;  // bytes a token
  const auto cache = [&](int64_t context, int64_t chunk, int64_t margin) {
    PlanOptions options = with(0, context, chunk);
    options.margin = margin;
    return plan_memory(m, options, kPlain).cache;
  };
  // Within window and margin all rows are there: what a model without windows takes.
  EXPECT(cache(1024, 128, 0) == plan_memory(model(), with(0, 1024, 128), kPlain).cache);
  // Then 32 rows a page: one of sinks; 512 + 512 + 128 rows and a page, for they begin anywhere.
  EXPECT(cache(32'768, 128, 0) == global * 32'768 + local * (32 + 1152 + 32));
  EXPECT(cache(32'768, 256, 0) == global * 32'768 + local * (32 + 1280 + 32));
  EXPECT(cache(32'768, 128, 64) == global * 32'768 + local * (32 + 704 + 32));
  EXPECT(cache(32'768, 128, 32'768) == (global + local) * 32'768);
}

TEST(all_caches, "what a budget leaves is for the caches of further sessions, and no more than that") {
  for (const char* engine : {"onnxruntime", "executorch"}) {
    const Description m = with_windows();
    const Plan least = plan_memory(m, with(0, 4096), plan_engine(engine));
    const uint64_t total = least.total();
    EXPECT(plan_memory(m, with(total, 4096), plan_engine(engine)).all_caches == least.cache);
    const Plan ample = plan_memory(m, with(total + 50 * kMB, 4096), plan_engine(engine));
    EXPECT(ample.cache == least.cache && ample.all_caches > least.cache + 48 * kMB);
    // As if the model's own cache had been larger.
    const uint64_t more = ample.all_caches - least.cache, share = (least.expected() + more) / 50;
    EXPECT(least.expected() + more + share + 5 * kMB <= total + 50 * kMB);
  }
}

TEST(windows_inverse, "context and budget are inverse where layers have windows") {
  const Description m = with_windows();
  uint64_t last = 0;
  for (int64_t context = 1; context <= 4096; ++context) {
    const uint64_t total = plan_memory(m, with(0, context), kPlain).total();
    EXPECT(total >= last);
    last = total;
  }
  for (const int64_t context : {1, 127, 1000, 1151, 1152, 1180, 1300, 5000, 32'767}) {
    const uint64_t least = plan_memory(m, with(0, context), kPlain).total();
    EXPECT(plan_memory(m, with(least, context), kPlain).over_budget.empty());
    const int64_t longest = plan_memory(m, with(least, 0), kPlain).context;
    EXPECT(longest >= context && plan_memory(m, with(0, longest), kPlain).total() <= least);
    EXPECT(plan_memory(m, with(0, longest + 1), kPlain).total() > least);
    EXPECT(!plan_memory(m, with(least - 1, context), kPlain).over_budget.empty());
  }
}

TEST(kinds, "an evaluation takes what its largest kind of layer takes, each cache its own") {
  const auto workspace = [](const Description& m, const char* engine) {
    return plan_memory(m, with(0, 4096), plan_engine(engine)).workspace;
  };
  for (const char* engine : {"onnxruntime", "executorch"}) {
    Description wide = model();
    wide.kinds[0].mlp_width = 32'768;
    Description latent = model();
    latent.kinds[0].head_dim = 576;
    latent.kinds[0].value_dim = 512;
    for (const Description& large : {wide, latent}) {
      Description both = model();
      both.kinds.push_back(large.kinds[0]);
      for (size_t i = 0; i < both.pattern.size(); i += 2) both.pattern[i] = 1;
      EXPECT(workspace(large, engine) > workspace(model(), engine));
      EXPECT(workspace(both, engine) == workspace(large, engine));
      const auto cache = [&](const Description& m) {
        return plan_memory(m, with(0, 4096), plan_engine(engine)).cache;
      };
      EXPECT(2 * cache(both) == cache(model()) + cache(large));
    }
    // Values beside the keys, and layers that have no rows of their own.
    Description apart = model();
    apart.kinds[0].rows = Rows::kSeparate;
    apart.kinds[0].value_dim = 128;
    apart.kinds.push_back(apart.kinds[0]);
    apart.kinds[1].rows = Rows::kOther;
    apart.kinds[1].rows_of = 0;
    for (size_t i = 1; i < apart.pattern.size(); i += 2) apart.pattern[i] = 1;
    EXPECT(plan_memory(apart, with(0, 4096), plan_engine(engine)).cache == 11 * 2 * (64 + 128) * 4096);
  }
}
