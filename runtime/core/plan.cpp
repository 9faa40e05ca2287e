#include "plan.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "error.h"

namespace edge_qkv {
namespace {

struct Bound {
  const char* name;
  int64_t value, least, most;
};

void check(const std::vector<Bound>& bounds) {
  for (const Bound& bound : bounds) {
    if (bound.value >= bound.least && bound.value <= bound.most) continue;
    throw Error(EQKV_INVALID_ARGUMENT, std::string("The plan's ") + bound.name + " must be from " +
                                           std::to_string(bound.least) + " to " +
                                           std::to_string(bound.most) + ", not " +
                                           std::to_string(bound.value) + ".");
  }
}

// What no description can know: whether the engine has weights of this kind.
void check_weights(const Description& model, const PlanEngine& engine) {
  const bool blocks = model.weight_bits < 16 && !(model.weight_bits == 8 && engine.row_scales);
  if (!blocks || model.block_size > 0) return;
  throw Error(EQKV_INVALID_ARGUMENT, "The engine has weights of " + std::to_string(model.weight_bits) +
                                         " bits only in blocks, and the model's block_size is 0.");
}

PlanOptions checked(const Description& model, PlanOptions options) {
  check({{"context", options.context, 0, model.max_positions},
         {"prefill_chunk", options.prefill_chunk, 0, kMostChunk},
         {"margin", options.margin, 0, int64_t{1} << 31},
         {"threads", options.threads, 1, 1 << 10}});
  options.prefill_chunk = chunk_tokens(options.prefill_chunk, model.prefill_chunk, model.max_positions);
  return options;
}

// The longest context whose cache has a size that a machine could have.
int64_t most_tokens(const CacheLayout& layout) {
  return static_cast<int64_t>((uint64_t{1} << 50) / static_cast<uint64_t>(layout.token_bytes()));
}

void check_tokens(const CacheLayout& layout, int64_t context) {
  if (context <= most_tokens(layout)) return;
  throw Error(EQKV_INVALID_ARGUMENT, "A cache of " + std::to_string(context) + " tokens of " +
                                         std::to_string(layout.token_bytes()) +
                                         " bytes has more bytes than exist.");
}

// Of an evaluation of `tokens` tokens that ends at the full context, in the layers that need the most;
// decode may split where prefill does not.
uint64_t attention_bytes(const Description& model, int64_t context, int64_t tokens, int threads) {
  uint64_t most = 0;
  for (const LayerKind& kind : model.kinds) {
    AttentionParams params;
    params.tokens = tokens;
    params.past = context - tokens;
    params.capacity = context;
    params.num_heads = static_cast<int>(kind.heads);
    params.kv_heads = static_cast<int>(kind.kv_heads);
    params.head_dim = static_cast<int>(kind.head_dim);
    params.value_dim = static_cast<int>(kind.value_dim);
    params.window = std::min(kind.window, context);
    params.sinks = std::min(kind.sinks, context);
    params.cache_type = model.cache;
    most = std::max<uint64_t>(most, attention_workspace_bytes(params, static_cast<size_t>(threads)));
  }
  return most;
}

Plan plan_for(const Description& model, const PlanOptions& options, int64_t context,
              const PlanEngine& engine) {
  const CacheLayout layout = cache_layout(model);
  PlanOptions exact = options;
  exact.context = context;
  exact.prefill_chunk = std::min(options.prefill_chunk, context);
  const EngineCosts costs = engine.costs(model, exact);
  Plan plan;
  plan.context = context;
  plan.prefill_chunk = exact.prefill_chunk;
  plan.threads = exact.threads;
  plan.cache_type = model.cache;
  plan.weights_file = costs.weights_file;
  plan.weights_anonymous = costs.weights_anonymous;
  plan.cache = resident_bytes(layout, context, exact.margin, exact.prefill_chunk);
  // The session keeps two rows of logits, those of the last
  // token and those that are being computed, and its tokens.
  plan.workspace = costs.workspace + 2 * sizeof(float) * static_cast<uint64_t>(model.vocab_size) +
                   sizeof(int32_t) * static_cast<uint64_t>(context) +
                   std::max(attention_bytes(model, context, exact.prefill_chunk, exact.threads),
                            attention_bytes(model, context, 1, exact.threads));
  if (costs.loading > plan.cache) plan.workspace = std::max(plan.workspace, costs.loading - plan.cache);
  plan.engine_file = costs.code;
  plan.engine_anonymous = costs.structures;
  plan.margin = costs.margin + plan.expected() / costs.margin_share;
  const uint64_t spare = options.memory > plan.total() ? options.memory - plan.total() : 0;
  plan.all_caches = plan.cache + spare / (costs.margin_share + 1) * costs.margin_share;
  return plan;
}

// The longest context whose total is at most `memory`; 0 where not even one token fits. A total never
// falls as the context grows.
int64_t longest_context(const Description& model, const PlanOptions& options, const PlanEngine& engine,
                        uint64_t memory) {
  int64_t fits = 0, beyond = std::min(model.max_positions, most_tokens(cache_layout(model))) + 1;
  while (beyond - fits > 1) {
    const int64_t middle = fits + (beyond - fits) / 2;
    if (plan_for(model, options, middle, engine).total() <= memory) {
      fits = middle;
    } else {
      beyond = middle;
    }
  }
  return fits;
}

// Of an amount that is needed; rounded up, so that the figure itself would do.
std::string megabytes(uint64_t bytes) {
  const uint64_t tenths = bytes / 100'000 + (bytes % 100'000 > 0 ? 1 : 0);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MB";
}

std::string over_budget(const Description& model, const PlanOptions& options, const PlanEngine& engine,
                        const Plan& plan) {
  const uint64_t allowed = options.memory;
  const auto tokens = [](int64_t n) { return std::to_string(n) + (n == 1 ? " token" : " tokens"); };
  std::string message = (options.context == 0 ? "Even a context of " : "A context of ") +
                        tokens(plan.context) + " needs " + megabytes(plan.total()) + " of memory and " +
                        std::to_string(allowed / 100'000 / 10) + "." +
                        std::to_string(allowed / 100'000 % 10) +
                        " MB are allowed: " + megabytes(plan.total() - allowed) + " short.";
  std::vector<std::string> changes;
  const auto consider = [&](const std::string& what, const Description& m, const PlanOptions& o) {
    const uint64_t total = plan_for(m, o, plan.context, engine).total();
    if (total <= allowed) changes.push_back(what + " (" + megabytes(total) + ")");
  };
  if (model.cache != CacheType::kInt8) {
    Description changed = model;
    changed.cache = CacheType::kInt8;
    consider("an int8 cache", changed, options);
  }
  if (const int64_t longest = longest_context(model, options, engine, allowed)) {
    changes.push_back("a context of " + tokens(longest) + " (" +
                      megabytes(plan_for(model, options, longest, engine).total()) + ")");
  }
  for (int64_t chunk = plan.prefill_chunk / 2; chunk >= 1; chunk /= 2) {  // the largest that fits
    PlanOptions changed = options;
    changed.prefill_chunk = chunk;
    const size_t before = changes.size();
    consider("a prefill chunk of " + std::to_string(chunk), model, changed);
    if (changes.size() > before) break;
  }
  if (model.weight_bits > 4) {
    const Description changed = engine.in_int4(model);
    consider("int4 weights", changed, options);
    const int64_t longest = longest_context(changed, options, engine, allowed);
    if (longest > 0 && longest < plan.context) {
      changes.push_back("int4 weights and a context of " + tokens(longest) + " (" +
                        megabytes(plan_for(changed, options, longest, engine).total()) + ")");
    }
  }
  if (!options.packed) {
    PlanOptions changed = options;
    changed.packed = true;
    consider("packed weights", model, changed);
  }
  if (changes.empty()) {
    if (plan.context == 1) return message;
    return message + " At least " + megabytes(plan_for(model, options, 1, engine).total()) +
           " are needed, for a context of 1 token.";
  }
  message += " What would fit: ";
  for (size_t i = 0; i < changes.size(); ++i) {
    message += (i == 0 ? "" : i + 1 < changes.size() ? ", " : " or ") + changes[i];
  }
  return message + ".";
}

}  // namespace

Plan plan_memory(const Description& model, const PlanOptions& given, const PlanEngine& engine) {
  check_weights(model, engine);
  const PlanOptions options = checked(model, given);
  const CacheLayout layout = cache_layout(model);
  int64_t context = options.context;
  if (context == 0) {
    context = options.memory == 0
                  ? std::min(model.max_positions, most_tokens(layout))
                  : std::max<int64_t>(1, longest_context(model, options, engine, options.memory));
  }
  check_tokens(layout, context);
  Plan plan = plan_for(model, options, context, engine);
  if (options.memory > 0 && plan.total() > options.memory) {
    plan.over_budget = over_budget(model, options, engine, plan);
  }
  return plan;
}

}  // namespace edge_qkv
