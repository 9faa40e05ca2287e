#include "attention_node.h"

#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "model_file.h"

namespace edge_qkv::ort {
namespace {

constexpr const char* kNames[] = {"query", "kv",    "cache",       "past",        "cos",
                                  "sin",   "value", "value_cache", "cache_scale", "value_cache_scale"};
constexpr size_t kMostRank = 4;

// Thrown inside this file only.
struct Refused {
  OrtStatus* status;
};

// A tensor of the node. The graph comes from a file: nothing about it is believed unchecked.
struct Tensor {
  OrtValue* value = nullptr;  // null: an optional tensor that is absent
  void* data = nullptr;
  int type = kUndefined;
  size_t rank = 0;
  int64_t shape[kMostRank] = {};
};

class Context {
 public:
  Context(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {
    check(api_.KernelContext_GetInputCount(context_, &inputs_));
    check(api_.KernelContext_GetOutputCount(context_, &outputs_));
  }

  void check(OrtStatus* status) const {
    if (status) throw Refused{status};
  }

  void require(bool sound, const std::string& sentence) const {
    if (!sound) throw Refused{api_.CreateStatus(kInvalidArgument, sentence.c_str())};
  }

  // Checks the element type unless it is kUndefined.
  Tensor input(AttentionNode::Input index, int type, size_t rank) const {
    Tensor tensor;
    const OrtValue* value = nullptr;
    if (index < inputs_) check(api_.KernelContext_GetInput(context_, index, &value));
    tensor.value = const_cast<OrtValue*>(value);
    if (!value) return tensor;
    describe(&tensor);
    const std::string name = std::string("The attention's input ") + kNames[index];
    require(type == kUndefined || tensor.type == type, name + " has the wrong element type.");
    require(tensor.rank == rank, name + " has " + std::to_string(tensor.rank) +
                                     " dimensions instead of " + std::to_string(rank) + ".");
    return tensor;
  }

  // Allocated, or bound by the caller. ONNX Runtime sees to it that its shape is the one asked for.
  void* output(AttentionNode::Output index, const Tensor& like) const {
    OrtValue* value = nullptr;
    if (index < outputs_) {
      check(api_.KernelContext_GetOutput(context_, index, like.shape, like.rank, &value));
    }
    require(value, "The attention's output " + std::to_string(index) + " is not connected.");
    void* data = nullptr;
    check(api_.GetTensorMutableData(value, &data));
    return data;
  }

 private:
  void describe(Tensor* tensor) const {
    OrtTensorTypeAndShapeInfo* raw = nullptr;
    check(api_.GetTensorTypeAndShape(tensor->value, &raw));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> info(
        raw, api_.ReleaseTensorTypeAndShapeInfo);
    check(api_.GetTensorElementType(raw, &tensor->type));
    check(api_.GetDimensionsCount(raw, &tensor->rank));
    if (tensor->rank <= kMostRank) check(api_.GetDimensions(raw, tensor->shape, tensor->rank));
    check(api_.GetTensorMutableData(tensor->value, &tensor->data));
  }

  const Api& api_;
  OrtKernelContext* const context_;
  size_t inputs_ = 0, outputs_ = 0;
};

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.rank == b.rank && std::memcmp(a.shape, b.shape, a.rank * sizeof a.shape[0]) == 0;
}

// The cache type of an element type; false where there is none.
bool cache_type_of(int element, CacheType* type) {
  for (const CacheType each : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    *type = each;
    if (element_type(each) == element) return true;
  }
  return false;
}

// Rows [0, past) of every head, for a tensor that is not updated in place: [B, G, C] rows of `row`
// bytes.
void copy_valid_rows(const AttentionParams& p, int64_t row_bytes, const void* from, void* to) {
  if (from == to) return;
  const size_t row = static_cast<size_t>(row_bytes);
  const size_t head = row * static_cast<size_t>(p.capacity);
  for (size_t i = 0; i < static_cast<size_t>(p.batch * p.kv_heads); ++i) {
    std::memcpy(static_cast<char*>(to) + i * head, static_cast<const char*>(from) + i * head,
                row * static_cast<size_t>(p.past));
  }
}

// ONNX Runtime's own threads, as the kernel wants them.
struct NodeThreads {
  const Api& api;
  OrtKernelContext* context;
  OrtStatus* error = nullptr;

  static void run(void* self, void (*fn)(void*, size_t), size_t count, void* arg) {
    auto& threads = *static_cast<NodeThreads*>(self);
    OrtStatus* error = threads.api.KernelContext_ParallelFor(threads.context, fn, count, 0, arg);
    if (!error) return;
    if (threads.error)
      threads.api.ReleaseStatus(error);
    else
      threads.error = error;
  }
};

}  // namespace

OrtStatus* AttentionNode::read_attributes(const OrtKernelInfo* info) {
  const auto integer = [&](const char* name, auto* out) -> OrtStatus* {
    int64_t value = 0;
    if (OrtStatus* error = api_.KernelInfoGetAttribute_int64(info, name, &value)) return error;
    if (value < 0 || value > INT_MAX) {
      return api_.CreateStatus(
          kInvalidArgument,
          (std::string("The attention's attribute ") + name + " is out of range.").c_str());
    }
    *out = static_cast<int>(value);
    return nullptr;
  };
  if (OrtStatus* error = integer("num_heads", &attributes_.num_heads)) return error;
  if (OrtStatus* error = integer("kv_heads", &attributes_.kv_heads)) return error;
  for (const auto& [name, out] :
       {std::pair{"window", &attributes_.window}, std::pair{"sinks", &attributes_.sinks}}) {
    if (OrtStatus* error = integer(name, out)) {
      api_.ReleaseStatus(error);
      return api_.CreateStatus(
          kInvalidArgument,
          "The attention has no sound window and sinks: an older edge-qkv wrote this "
          "model; export it again.");
    }
  }
  if (OrtStatus* error = api_.KernelInfoGetAttribute_float(info, "scale", &attributes_.scale))
    return error;

  char rotary[16] = "none";
  size_t size = sizeof rotary;
  if (OrtStatus* error = api_.KernelInfoGetAttribute_string(info, "rotary", rotary, &size)) return error;
  const std::string mode(rotary);
  if (mode == "none") {
    attributes_.rotary = Rotary::kNone;
    return nullptr;
  }
  if (mode != "conjugate" && mode != "on_read") {
    return api_.CreateStatus(kInvalidArgument,
                             "The attention's attribute rotary must be none, conjugate or on_read.");
  }
  attributes_.rotary = mode == "conjugate" ? Rotary::kConjugate : Rotary::kOnRead;
  return integer("rotary_dim", &attributes_.rotary_dim);
}

OrtStatus* AttentionNode::compute(OrtKernelContext* raw) const try {
  const Context context(api_, raw);
  const Tensor query = context.input(kQuery, kFloat, 3);                 // [B, T, H*D]
  const Tensor key = context.input(kKey, kFloat, 3);                     // [B, T, G*D]
  const Tensor cache = context.input(kCache, kUndefined, 4);             // [B, G, C, D]
  const Tensor past = context.input(kPast, kInt64, 0);                   // []
  const Tensor cos = context.input(kCos, kFloat, 2);                     // [P, R/2]
  const Tensor sin = context.input(kSin, kFloat, 2);                     // [P, R/2]
  const Tensor value = context.input(kValue, kFloat, 3);                 // [B, T, G*D]
  const Tensor value_cache = context.input(kValueCache, kUndefined, 4);  // [B, G, C, D]
  const Tensor cache_scale = context.input(kCacheScale, kFloat16, 3);    // [B, G, C]
  const Tensor value_cache_scale = context.input(kValueCacheScale, kFloat16, 3);

  AttentionParams params = attributes_;
  context.require(query.value && key.value && cache.value && past.value,
                  "The attention needs query, kv, cache and past.");
  context.require(cache_type_of(cache.type, &params.cache_type),
                  "The cache must be float, float16 or int8.");
  params.batch = query.shape[0];
  params.tokens = query.shape[1];
  params.past = *static_cast<const int64_t*>(past.data);
  params.capacity = cache.shape[2];
  context.require(cache.shape[3] <= INT_MAX, "The cache's head_dim is out of range.");
  params.head_dim = static_cast<int>(cache.shape[3]);

  const auto rows_like = [&](const Tensor& t, int64_t heads) {  // [B, T, heads*D]
    return t.shape[0] == params.batch && t.shape[1] == params.tokens &&
           t.shape[2] == heads * params.head_dim;
  };
  context.require(cache.shape[0] == params.batch && cache.shape[1] == params.kv_heads,
                  "The cache's batch or kv heads do not fit the query and kv_heads.");
  context.require(rows_like(query, params.num_heads),
                  "The query's width is not num_heads times head_dim.");
  context.require(rows_like(key, params.kv_heads),
                  "The shape of kv does not fit the query and the cache.");
  context.require(!value.value == !value_cache.value,
                  "A separate value needs a value cache, and only it.");
  if (value.value) {
    context.require(same_shape(value, key), "The shapes of kv and value differ.");
    context.require(same_shape(value_cache, cache) && value_cache.type == cache.type,
                    "The shapes or types of the two caches differ.");
  }
  for (const Tensor* scale : {&cache_scale, &value_cache_scale}) {
    context.require(
        !scale->value || std::memcmp(scale->shape, cache.shape, 3 * sizeof cache.shape[0]) == 0,
        "The shapes of a cache and its scales differ.");
  }
  if (params.rotary != Rotary::kNone) {
    context.require(
        cos.value && sin.value && same_shape(cos, sin) && cos.shape[1] == params.rotary_dim / 2,
        "Rotary positions need cos and sin of [positions, rotary_dim / 2].");
    params.rotary_rows = cos.shape[0];
    params.cos = static_cast<const float*>(cos.data);
    params.sin = static_cast<const float*>(sin.data);
  }

  params.query = static_cast<const float*>(query.data);
  params.key = static_cast<const float*>(key.data);
  params.value = static_cast<const float*>(value.data);
  params.key_cache = cache.data;
  params.value_cache = value_cache.data;
  params.key_scales = static_cast<uint16_t*>(cache_scale.data);
  params.value_scales = static_cast<uint16_t*>(value_cache_scale.data);
  params.output = static_cast<float*>(context.output(kAttention, query));
  // Before the outputs replace the inputs: `past` must be sound for the copy.
  const char* unsound = attention_error(params);
  context.require(!unsound, unsound ? unsound : "");

  const CacheTypeFacts& type = facts(params.cache_type);
  const auto update = [&](const Tensor& from, Output index, int64_t row_bytes) -> void* {
    if (!from.value) return nullptr;
    void* to = context.output(index, from);
    copy_valid_rows(params, row_bytes, from.data, to);
    return to;
  };
  const int64_t row_bytes = params.head_dim * type.value_bytes;
  params.key_cache = update(cache, kCacheOut, row_bytes);
  params.value_cache = update(value_cache, kValueCacheOut, row_bytes);
  params.key_scales = static_cast<uint16_t*>(update(cache_scale, kCacheScaleOut, type.scale_bytes));
  params.value_scales =
      static_cast<uint16_t*>(update(value_cache_scale, kValueCacheScaleOut, type.scale_bytes));

  // Not kept between calls: sessions run at the same time, and every layer has a node of its own.
  const std::unique_ptr<void, void (*)(void*)> workspace(
      std::malloc(attention_workspace_bytes(params, tasks_) + 1), std::free);  // never of 0 bytes
  context.require(workspace != nullptr, "There is no memory for the attention's workspace.");
  NodeThreads threads{api_, raw};
  attention(params, workspace.get(), tasks_, {NodeThreads::run, &threads});
  return threads.error;
} catch (const Refused& refused) {
  return refused.status;
}

}  // namespace edge_qkv::ort
