#include "custom_op.h"

#include <climits>
#include <exception>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attention_node.h"
#include "core/processors.h"
#include "edge_qkv.h"

namespace edge_qkv::ort {
namespace {

// One for each kind of layer that a model may have, see custom_op.h.
constexpr const char* kNames[] = {
    "UnifiedKVAttention",    "UnifiedKVAttention_1",  "UnifiedKVAttention_2",  "UnifiedKVAttention_3",
    "UnifiedKVAttention_4",  "UnifiedKVAttention_5",  "UnifiedKVAttention_6",  "UnifiedKVAttention_7",
    "UnifiedKVAttention_8",  "UnifiedKVAttention_9",  "UnifiedKVAttention_10", "UnifiedKVAttention_11",
    "UnifiedKVAttention_12", "UnifiedKVAttention_13", "UnifiedKVAttention_14", "UnifiedKVAttention_15"};

// ONNX Runtime tells types apart by operator: one of the same name for each type of the cache.
struct AttentionOp : CustomOp {
  const Api* api;
  const char* name;
  int cache_type;  // kFloat, kFloat16 or kInt8
  size_t tasks;
};

const AttentionOp& self(const CustomOp* op) { return *static_cast<const AttentionOp*>(op); }

// Nothing may be thrown into ONNX Runtime.
template <class Function>
OrtStatus* guarded(const Api& api, Function function) noexcept {
  try {
    return function();
  } catch (const std::exception& error) {
    return api.CreateStatus(kFail, error.what());
  } catch (...) {
    return api.CreateStatus(kFail, "unknown error");
  }
}

int input_type(const CustomOp* op, size_t index) {
  switch (index) {
    case kCache:
    case kValueCache:
      return self(op).cache_type;
    case kPast:
      return kInt64;
    case kCacheScale:
    case kValueCacheScale:
      return kFloat16;
    default:
      return kFloat;
  }
}

int output_type(const CustomOp* op, size_t index) {
  switch (index) {
    case AttentionNode::kAttention:
      return kFloat;
    case AttentionNode::kCacheScaleOut:
    case AttentionNode::kValueCacheScaleOut:
      return kFloat16;
    default:
      return self(op).cache_type;
  }
}

// An integer attribute; -1 where there is none, of which the kernel complains.
int64_t read_attribute(const Api& api, OrtShapeInferContext* context, const char* name) {
  const OrtOpAttr* attribute = nullptr;
  int64_t value = -1;
  size_t bytes = 0;
  OrtStatus* error = api.ShapeInferContext_GetAttribute(context, name, &attribute);
  if (!error) error = api.ReadOpAttr(attribute, kAttributeInt, &value, sizeof value, &bytes);
  if (!error) return value;
  api.ReleaseStatus(error);
  return -1;
}

// Memory is planned by shapes. The attention's is the query's, symbols and all, but for the width.
OrtStatus* infer_shapes(const CustomOp* op, OrtShapeInferContext* context) {
  const Api& api = *self(op).api;
  OrtTensorTypeAndShapeInfo *query = nullptr, *cache = nullptr;
  if (OrtStatus* error = api.ShapeInferContext_GetInputTypeShape(context, kQuery, &query)) return error;
  if (OrtStatus* error = api.ShapeInferContext_GetInputTypeShape(context, kCache, &cache)) return error;
  // Fails where the node has no such output, having no rows to write.
  OrtStatus* absent = api.ShapeInferContext_SetOutputTypeShape(context, AttentionNode::kCacheOut, cache);
  if (absent) api.ReleaseStatus(absent);

  const int64_t heads = read_attribute(api, context, "num_heads");
  const int64_t value_dim = read_attribute(api, context, "value_dim");
  int64_t shape[3] = {}, width = 0;
  size_t rank = 0;
  if (OrtStatus* error = api.GetDimensionsCount(query, &rank)) return error;
  if (rank != std::size(shape)) return nullptr;
  if (OrtStatus* error = api.GetDimensions(query, shape, rank)) return error;
  if (shape[2] < 0 || heads < 0 || value_dim < 0) return nullptr;
  if (__builtin_mul_overflow(heads, value_dim, &width)) return nullptr;
  shape[2] = width;
  if (OrtStatus* error = api.SetDimensions(query, shape, rank)) return error;
  return api.ShapeInferContext_SetOutputTypeShape(context, AttentionNode::kAttention, query);
}

constexpr int kInplaceInputs[] = {kCache, kValueCache, kCacheScale, kValueCacheScale};
constexpr int kInplaceOutputs[] = {AttentionNode::kCacheOut, AttentionNode::kValueCacheOut,
                                   AttentionNode::kCacheScaleOut, AttentionNode::kValueCacheScaleOut};

CustomOp describe() {
  CustomOp op = {};
  op.version = kApiVersion;
  op.GetName = [](const CustomOp* op) { return self(op).name; };
  op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const CustomOp*) -> size_t { return kOperatorInputs; };
  op.GetOutputType = output_type;
  op.GetOutputTypeCount = [](const CustomOp*) -> size_t { return AttentionNode::kOutputs; };
  op.GetInputCharacteristic = [](const CustomOp*, size_t index) {
    return index == kQuery || index == kCache || index == kPast ? kRequired : kOptional;
  };
  op.GetOutputCharacteristic = [](const CustomOp*, size_t index) {
    return index > AttentionNode::kAttention ? kOptional : kRequired;
  };
  op.GetInputMemoryType = [](const CustomOp*, size_t) { return kMemTypeDefault; };
  op.GetVariadicInputMinArity = [](const CustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const CustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const CustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const CustomOp*) { return 0; };
  op.GetStartVersion = [](const CustomOp*) { return 1; };
  op.GetEndVersion = [](const CustomOp*) { return INT_MAX; };
  op.InferOutputShapeFn = infer_shapes;
  op.CreateKernelV2 = [](const CustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    const Api& api = *self(op).api;
    return guarded(api, [&]() -> OrtStatus* {
      *kernel = nullptr;
      auto node = std::make_unique<AttentionNode>(api, self(op).tasks);
      if (OrtStatus* error = node->read_attributes(info)) return error;
      *kernel = node.release();
      return nullptr;
    });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& node = *static_cast<const AttentionNode*>(kernel);
    return guarded(node.api(), [&] { return node.compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<AttentionNode*>(kernel); };
  op.GetMayInplace = [](int** inputs, int** outputs) -> size_t {
    *inputs = const_cast<int*>(kInplaceInputs);
    *outputs = const_cast<int*>(kInplaceOutputs);
    return std::size(kInplaceInputs);
  };
  op.ReleaseMayInplace = [](int*, int*) {};
  op.GetAliasMap = [](int**, int**) -> size_t { return 0; };
  op.ReleaseAliasMap = [](int*, int*) {};
  return op;
}

// The operators and the domain that holds them.
struct Registration {
  Registration(const OrtApi* table, int threads) : api(table) {
    for (const char* name : kNames) {
      for (const int type : {kFloat16, kFloat, kInt8}) {
        ops.push_back({describe(), &api, name, type, static_cast<size_t>(threads)});
      }
    }
  }

  OrtStatus* make_domain() {
    if (OrtStatus* error = api.CreateCustomOpDomain("edge_qkv", &domain)) return error;
    for (const AttentionOp& op : ops) {
      const auto* added = reinterpret_cast<const OrtCustomOp*>(&op);
      if (OrtStatus* error = api.CustomOpDomain_Add(domain, added)) return error;
    }
    return nullptr;
  }

  ~Registration() {
    if (domain) api.ReleaseCustomOpDomain(domain);
  }

  const Api api;
  std::vector<AttentionOp> ops;  // never moved: the domain refers to them
  OrtCustomOpDomain* domain = nullptr;
};

}  // namespace

OrtStatus* add_attention_op(const OrtApi* table, OrtSessionOptions* options, int threads) {
  static std::mutex mutex;
  // Never destroyed: sessions refer to the operators for as long as they live.
  static auto& registrations =
      *new std::map<std::pair<const OrtApi*, int>, std::unique_ptr<Registration>>;

  return guarded(Api(table), [&]() -> OrtStatus* {
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Registration>& registration = registrations[{table, threads}];
    if (!registration) {
      auto made = std::make_unique<Registration>(table, threads);
      if (OrtStatus* error = made->make_domain()) return error;
      registration = std::move(made);
    }
    return registration->api.AddCustomOpDomain(options, registration->domain);
  });
}

}  // namespace edge_qkv::ort

// What ONNX Runtime calls when the library is given to RegisterCustomOpsLibrary. How many threads the
// session will have is not known here.
extern "C" EQKV_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                 const edge_qkv::ort::ApiBase* base) {
  using namespace edge_qkv::ort;
  const OrtApi* table = base->GetApi(kApiVersion);
  if (!table) {  // its table may be shorter than ours: only the first slot is sure
    const auto create_status =
        reinterpret_cast<OrtStatus* (*const*)(int, const char*)>(base->GetApi(1))[0];
    return create_status(kFail, "This ONNX Runtime is too old for edge-qkv; it needs 1.20 or newer.");
  }
  return add_attention_op(table, options, edge_qkv::processors());
}
