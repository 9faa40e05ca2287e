// The plan's part of the C ABI, and packing.
#include "plan_api.h"

#include "binding.h"

namespace edge_qkv {
namespace {

CacheType cache_type(const char* name, CacheType otherwise) {
  if (!name) return otherwise;
  for (const CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    if (std::strcmp(name, cache_type_info(type).name) == 0) return type;
  }
  throw Error(EQKV_INVALID_ARGUMENT,
              "cache_type must be fp32, fp16 or int8, not \"" + std::string(name).substr(0, 40) + "\".");
}

PlanOptions plan_options(const eqkv_plan_options& given) {
  PlanOptions options;
  options.memory = given.memory;
  options.context = given.context;
  options.prefill_chunk = given.prefill_chunk;
  options.margin = given.margin;
  options.threads = resolved_threads(given.threads);
  options.packed = given.packed != 0;
  return options;
}

eqkv_plan_options read_plan_options(const eqkv_plan_options* given) {
  eqkv_plan_options options = {};
  return given ? read_options(given, options) : options;
}

// Plans the model, whose files have `weight_bytes`, and fills in `out`; then throws where the budget
// does not hold the plan.
void plan(Description model, const PlanEngine& engine, const eqkv_plan_options& options,
          uint64_t weight_bytes, eqkv_plan_info* out) {
  model.cache = cache_type(options.cache_type, model.cache);
  const Plan p = plan_memory(model, plan_options(options), engine);
  write_info(
      out, {0, p.context, p.prefill_chunk, p.threads, cache_type_info(p.cache_type).name, p.weights_file,
            p.weights_anonymous, p.cache, p.workspace, p.engine_file, p.engine_anonymous, p.expected(),
            p.margin, p.total(), p.anonymous(), weight_bytes, model.matrix_bytes});
  if (!p.over_budget.empty()) throw Error(EQKV_OVER_BUDGET, p.over_budget);
}

}  // namespace

EngineOptions engine_options(const eqkv_model_options& options) {
  const auto text = [](const char* given) { return std::string(given ? given : ""); };
  return {text(options.engine_library), options.threads, text(options.packed_weights)};
}

Plan plan_to_open(const ModelInfo& model, const eqkv_model_options& given) {
  PlanOptions options;
  options.memory = given.memory;
  if (given.memory > 0) {  // without a budget they ask for nothing
    options.context = given.context;
    options.prefill_chunk = given.prefill_chunk;
  }
  options.threads = resolved_threads(given.threads);
  options.packed = model_is_packed(model, engine_options(given));
  const Plan plan = plan_memory(model.description, options, plan_engine(model.engine));
  if (!plan.over_budget.empty()) throw Error(EQKV_OVER_BUDGET, model.path + ": " + plan.over_budget);
  return plan;
}

}  // namespace edge_qkv

using namespace edge_qkv;

extern "C" {

eqkv_status eqkv_plan(const char* description, const eqkv_plan_options* options, eqkv_plan_info* info) {
  return guarded([&] {
    require(description, "description");
    require(info, "plan");
    const eqkv_plan_options read = read_plan_options(options);
    const PlanEngine& engine = plan_engine(read.engine ? read.engine : "onnxruntime");
    const Description model = read_description(description, "The plan's model", EQKV_INVALID_ARGUMENT);
    plan(model, engine, read, model.matrix_bytes + model.table_bytes, info);
  });
}

eqkv_status eqkv_plan_package(const char* path, const eqkv_plan_options* options, eqkv_plan_info* info) {
  return guarded([&] {
    require(path, "path");
    require(info, "plan");
    const eqkv_plan_options read = read_plan_options(options);
    const ModelInfo model = describe_model(path);
    const PlanEngine& engine = plan_engine(read.engine ? read.engine : model.engine);
    if (&engine != &plan_engine(model.engine)) {
      throw Error(EQKV_INVALID_ARGUMENT, std::string(path) + ": was exported for the engine " +
                                             model.engine + "; leave out engine \"" + read.engine +
                                             "\", or export the model for it.");
    }
    plan(model.description, engine, read, model.file_bytes, info);
  });
}

eqkv_status eqkv_model_pack(const char* path, const eqkv_model_options* options) {
  return guarded([&] {
    require(path, "path");
    require(options, "options");
    const EngineOptions read = engine_options(read_options(options, eqkv_model_options{}));
    pack_model(describe_model(path), read);
  });
}

eqkv_status eqkv_model_is_packed(const char* path, const eqkv_model_options* options, int32_t* packed) {
  return guarded([&] {
    require(path, "path");
    require(options, "options");
    require(packed, "packed");
    const EngineOptions read = engine_options(read_options(options, eqkv_model_options{}));
    *packed = model_is_packed(describe_model(path), read);
  });
}

}  // extern "C"
