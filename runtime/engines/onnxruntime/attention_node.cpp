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

// Thrown inside this file only.
struct Refused {
  OrtStatus* status;
};

constexpr std::pair<int, Element> kElements[] = {{kFloat, Element::kFloat32},
                                                 {kFloat16, Element::kFloat16},
                                                 {kInt8, Element::kInt8},
                                                 {kInt64, Element::kInt64}};

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

  // Absent where an optional one is.
  OperatorTensor input(size_t index) const {
    OperatorTensor tensor;
    const OrtValue* value = nullptr;
    if (index < inputs_) check(api_.KernelContext_GetInput(context_, index, &value));
    if (!value) return tensor;
    tensor.present = true;
    OrtTensorTypeAndShapeInfo* raw = nullptr;
    check(api_.GetTensorTypeAndShape(value, &raw));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> info(
        raw, api_.ReleaseTensorTypeAndShapeInfo);
    int type = kUndefined;
    check(api_.GetTensorElementType(raw, &type));
    for (const auto& [number, element] : kElements) {
      if (number == type) tensor.element = element;
    }
    check(api_.GetDimensionsCount(raw, &tensor.rank));
    if (tensor.rank <= kMostRank) check(api_.GetDimensions(raw, tensor.shape, tensor.rank));
    check(api_.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
    return tensor;
  }

  // Allocated, or bound by the caller. ONNX Runtime sees to it that its shape is the one asked for.
  void* output(AttentionNode::Output index, const OperatorTensor& like) const {
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
  const Api& api_;
  OrtKernelContext* const context_;
  size_t inputs_ = 0, outputs_ = 0;
};

// Rows [0, past) of every head, for a tensor that is
// not updated in place: [B, G, C] rows of `row` bytes.
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
  OrtStatus* missing = integer("value_dim", &attributes_.value_dim);
  if (!missing) missing = integer("window", &attributes_.window);
  if (!missing) missing = integer("sinks", &attributes_.sinks);
  if (missing) {
    api_.ReleaseStatus(missing);
    return api_.CreateStatus(kInvalidArgument,
                             "The attention has no sound value_dim, window and sinks: an older "
                             "edge-qkv wrote this model; export it again.");
  }
  if (OrtStatus* error = api_.KernelInfoGetAttribute_float(info, "scale", &attributes_.scale))
    return error;

  char rotary[16] = "none";
  size_t size = sizeof rotary;
  if (OrtStatus* error = api_.KernelInfoGetAttribute_string(info, "rotary", rotary, &size)) return error;
  if (!read_rotary_mode(rotary, &attributes_.rotary)) {
    return api_.CreateStatus(kInvalidArgument,
                             "The attention's attribute rotary must be none, conjugate or on_read.");
  }
  if (attributes_.rotary == Rotary::kNone) return nullptr;
  if (OrtStatus* error = integer("rotary_dim", &attributes_.rotary_dim)) return error;
  return integer("rotary_offset", &attributes_.rotary_offset);
}

OrtStatus* AttentionNode::compute(OrtKernelContext* raw) const try {
  const Context context(api_, raw);
  OperatorTensor inputs[kOperatorInputs];
  for (size_t i = 0; i < kOperatorInputs; ++i) inputs[i] = context.input(i);
  AttentionParams params = attributes_;
  const std::string unfit = read_operator(inputs, &params);
  context.require(unfit.empty(), unfit);
  OperatorTensor attended = inputs[kQuery];
  attended.shape[2] = output_width(params);
  params.output = static_cast<float*>(context.output(kAttention, attended));
  // Before the outputs replace the inputs: `past` must be sound for the copy.
  const char* unsound = attention_error(params);
  context.require(!unsound, unsound ? unsound : "");

  const CacheTypeInfo& type = cache_type_info(params.cache_type);
  const auto update = [&](OperatorInput input, Output index, int64_t row_bytes) -> void* {
    const OperatorTensor& from = inputs[input];
    if (!from.present || !inputs[kKey].present) return from.data;  // without kv nothing is written
    void* to = context.output(index, from);
    copy_valid_rows(params, row_bytes, from.data, to);
    return to;
  };
  params.key_cache = update(kCache, kCacheOut, params.head_dim * type.value_bytes);
  params.value_cache = update(kValueCache, kValueCacheOut, params.value_dim * type.value_bytes);
  params.key_scales = static_cast<uint16_t*>(update(kCacheScale, kCacheScaleOut, type.scale_bytes));
  params.value_scales =
      static_cast<uint16_t*>(update(kValueCacheScale, kValueCacheScaleOut, type.scale_bytes));

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
