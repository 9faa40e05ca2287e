// The plan's part of the C ABI, and packing.
#include "plan_api.h"

#include "binding.h"

namespace edge_qkv {
namespace {

CacheType cache_type(const char* name, CacheType otherwise) {
  if (!name) return otherwise;
  for (const CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    if (std::strcmp(name, facts(type).name) == 0) return type;
  }
  throw Error(EQKV_INVALID_ARGUMENT,
              "cache_type must be fp32, fp16 or int8, not \"" + std::string(name).substr(0, 40) + "\".");
}

PlanOptions plan_options(const eqkv_plan_options& given) {
  PlanOptions options;
  options.memory = given.memory;
  options.context = given.context;
  options.prefill_chunk = given.prefill_chunk;
  options.threads = resolved_threads(given.threads);
  options.packed = given.packed != 0;
  return options;
}

eqkv_plan_options read_plan_options(const eqkv_plan_options* given) {
  eqkv_plan_options options = {};
  return given ? read_options(given, options) : options;
}

PlanModel plan_model(const eqkv_plan_model& m) {
  PlanModel model;
  model.cache = {CacheType::kFloat16, m.layers, m.caches, m.kv_heads, m.head_dim};
  model.heads = m.heads;
  model.width = m.width;
  model.mlp_width = m.mlp_width;
  model.mlp_matrices = m.mlp_matrices;
  model.vocab_size = m.vocab_size;
  model.max_positions = m.max_positions;
  model.weight_bytes = m.weight_bytes;
  model.matrix_bytes = m.matrix_bytes;
  model.table_bytes = m.table_bytes;
  model.weight_bits = m.weight_bits;
  model.block_size = m.block_size;
  model.prefill_chunk = m.prefill_chunk;
  return model;
}

void write_model(const PlanModel& m, eqkv_plan_model* out) {
  write_info(out, {0, m.cache.layers, m.cache.caches, m.cache.kv_heads, m.cache.head_dim, m.heads,
                   m.width, m.mlp_width, m.mlp_matrices, m.vocab_size, m.max_positions, m.weight_bytes,
                   m.matrix_bytes, m.table_bytes, m.weight_bits, m.block_size, m.prefill_chunk});
}

// Fills in `out`, then throws where the budget does not hold the plan.
void write_plan(const Plan& p, eqkv_plan_info* out) {
  write_info(out, {0, p.context, p.prefill_chunk, p.threads, facts(p.cache_type).name, p.weights_file,
                   p.weights_anonymous, p.cache, p.workspace, p.engine_file, p.engine_anonymous,
                   p.expected(), p.margin, p.total(), p.anonymous()});
  if (!p.over_budget.empty()) throw Error(EQKV_OVER_BUDGET, p.over_budget);
}

}  // namespace

EngineOptions engine_options(const eqkv_model_options& options) {
  const auto text = [](const char* given) { return std::string(given ? given : ""); };
  return {text(options.engine_library), options.threads, text(options.packed_weights)};
}

Plan plan_to_open(const std::string& path, const eqkv_model_options& given) {
  PlanOptions options;
  options.memory = given.memory;
  if (given.memory > 0) {  // without a budget they ask for nothing
    options.context = given.context;
    options.prefill_chunk = given.prefill_chunk;
  }
  options.threads = resolved_threads(given.threads);
  options.packed = model_is_packed(path, engine_options(given));
  const ModelDescription model = describe_model(path);
  const Plan plan = plan_memory(model.plan, options, plan_engine(model.info.engine));
  if (!plan.over_budget.empty()) throw Error(EQKV_OVER_BUDGET, path + ": " + plan.over_budget);
  return plan;
}

}  // namespace edge_qkv

using namespace edge_qkv;

extern "C" {

eqkv_status eqkv_plan(const eqkv_plan_model* model, const eqkv_plan_options* options,
                      eqkv_plan_info* plan) {
  return guarded([&] {
    require(model, "model");
    require(plan, "plan");
    const eqkv_plan_options read = read_plan_options(options);
    PlanModel planned = plan_model(read_options(model, {}));
    planned.cache.type = cache_type(read.cache_type, CacheType::kFloat16);
    const PlanEngine& engine = plan_engine(read.engine ? read.engine : "onnxruntime");
    write_plan(plan_memory(planned, plan_options(read), engine), plan);
  });
}

eqkv_status eqkv_plan_package(const char* path, const eqkv_plan_options* options, eqkv_plan_info* plan,
                              eqkv_plan_model* model) {
  return guarded([&] {
    require(path, "path");
    require(plan, "plan");
    const eqkv_plan_options read = read_plan_options(options);
    const ModelDescription described = describe_model(path);
    const PlanEngine& engine = plan_engine(read.engine ? read.engine : described.info.engine);
    if (&engine != &plan_engine(described.info.engine)) {
      throw Error(EQKV_INVALID_ARGUMENT, std::string(path) + ": was exported for the engine " +
                                             described.info.engine + "; leave out engine \"" +
                                             read.engine + "\", or export the model for it.");
    }
    PlanModel planned = described.plan;
    planned.cache.type = cache_type(read.cache_type, planned.cache.type);
    if (model) write_model(planned, model);
    write_plan(plan_memory(planned, plan_options(read), engine), plan);
  });
}

eqkv_status eqkv_model_pack(const char* path, const eqkv_model_options* options) {
  return guarded([&] {
    require(path, "path");
    require(options, "options");
    pack_model(path, engine_options(read_options(options, eqkv_model_options{})));
  });
}

eqkv_status eqkv_model_is_packed(const char* path, const eqkv_model_options* options, int32_t* packed) {
  return guarded([&] {
    require(path, "path");
    require(options, "options");
    require(packed, "packed");
    *packed = model_is_packed(path, engine_options(read_options(options, eqkv_model_options{})));
  });
}

}  // extern "C"
