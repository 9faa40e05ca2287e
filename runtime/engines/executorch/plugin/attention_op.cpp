#include "attention_op.h"

#include <executorch/runtime/core/exec_aten/util/dim_order_util.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>

#include "attention/attention.h"
#include "engines/operator.h"
#include "log.h"

namespace edge_qkv::et {

thread_local const RunningCall* running_call = nullptr;

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

// The operator, and the one for layers that read the rows of an earlier layer, which has no new ones: it
// changes nothing, so a program may order it by what it reads alone.
constexpr const char* kName = "edge_qkv::unified_kv_attention.out";
constexpr OperatorInput kInputs[] = {kQuery,    kKey,   kCache,      kPast,       kCos,
                                     kSin,      kValue, kValueCache, kCacheScale, kValueCacheScale,
                                     kKeyWeight};
constexpr const char* kReadName = "edge_qkv::unified_kv_read_attention.out";
constexpr OperatorInput kReadInputs[] = {
    kQuery, kCache, kPast, kCos, kSin, kValueCache, kCacheScale, kValueCacheScale, kKeyWeight};

// After the tensors; the result comes twice, as argument and as return value.
enum Attribute {
  kNumHeads,
  kKvHeads,
  kScale,
  kRotary,
  kRotaryDim,
  kRotaryOffset,
  kValueDim,
  kWindow,
  kSinks,
  kOut,
  kAttributes
};

Element element_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Element::kFloat32;
    case ScalarType::Half:
      return Element::kFloat16;
    case ScalarType::Char:
      return Element::kInt8;
    case ScalarType::Long:
      return Element::kInt64;
    default:
      return Element::kOther;
  }
}

OperatorTensor describe(const EValue& value) {
  OperatorTensor described;
  if (!value.isTensor()) return described;
  const Tensor& tensor = value.toTensor();
  described.present = true;
  described.element = element_of(tensor.scalar_type());
  described.rank = static_cast<size_t>(tensor.dim());
  for (size_t i = 0; i < described.rank && i < kMostRank; ++i) {
    described.shape[i] = tensor.size(static_cast<ssize_t>(i));
  }
  described.data = tensor.mutable_data_ptr();
  return described;
}

// As OperatorTensor promises: gaps a tensor of ExecuTorch has none.
bool row_major(const EValue& value) {
  if (!value.isTensor()) return true;
  const auto order = value.toTensor().dim_order();
  return executorch::runtime::is_contiguous_dim_order(order.data(), order.size());
}

// Reads an attribute that must be from 0 to INT_MAX.
template <class Out>
bool integer(const EValue& value, Out* out) {
  if (!value.isInt() || value.toInt() < 0 || value.toInt() > INT_MAX) return false;
  *out = static_cast<Out>(value.toInt());
  return true;
}

bool read_attributes(EValue* const* attributes, AttentionParams* params) {
  const auto at = [&](Attribute index) -> const EValue& { return *attributes[index]; };
  if (!integer(at(kNumHeads), &params->num_heads) || !integer(at(kKvHeads), &params->kv_heads) ||
      !integer(at(kRotaryDim), &params->rotary_dim) ||
      !integer(at(kRotaryOffset), &params->rotary_offset) ||
      !integer(at(kValueDim), &params->value_dim) || !integer(at(kWindow), &params->window) ||
      !integer(at(kSinks), &params->sinks) || !at(kScale).isDouble() || !at(kRotary).isString()) {
    return false;
  }
  params->scale = static_cast<float>(at(kScale).toDouble());
  return read_rotary_mode(std::string(at(kRotary).toString()), &params->rotary);
}

// ExecuTorch's threads, as the kernel wants them.
void parallel_for(void* context, void (*fn)(void*, size_t), size_t count, void* arg) {
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(arg, static_cast<size_t>(i));
  };
  const int64_t all = static_cast<int64_t>(count);
  if (*static_cast<size_t*>(context) < 2 || !executorch::extension::parallel_for(0, all, 1, run)) {
    run(0, all);
  }
}

bool is_cache(const RunningCall& call, const OperatorTensor& tensor) {
  std::byte* const* end = call.caches + call.cache_count;
  return !tensor.present || std::find(call.caches, end, tensor.data) != end;
}

bool is_planned(const RunningCall& call, const Tensor& tensor) {
  const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return std::any_of(call.planned->begin(), call.planned->end(), [&](const Span<uint8_t>& buffer) {
    return std::less_equal<>()(buffer.data(), data) &&
           std::less<>()(data, buffer.data() + buffer.size());
  });
}

// One sentence, or empty.
std::string compute(const Span<EValue*>& arguments, const OperatorInput* order, size_t tensors) {
  AttentionParams params;
  EValue* const* const attributes = arguments.data() + tensors;
  if (arguments.size() < tensors + kAttributes || !read_attributes(attributes, &params)) {
    return "The attention's attributes are not those of this version of the operator.";
  }
  for (const EValue* argument : arguments) {
    if (!row_major(*argument)) return "The attention has a tensor that is not in row-major order.";
  }
  OperatorTensor inputs[kOperatorInputs];
  for (size_t i = 0; i < tensors; ++i) inputs[order[i]] = describe(*arguments[i]);
  std::string unfit = read_operator(inputs, &params);
  if (!unfit.empty()) return unfit;
  if (!attributes[kOut]->isTensor()) return "The attention has no output.";
  Tensor& out = attributes[kOut]->toTensor();
  using executorch::aten::SizesType;
  const SizesType shape[] = {static_cast<SizesType>(params.batch), static_cast<SizesType>(params.tokens),
                             static_cast<SizesType>(output_width(params))};
  if (out.scalar_type() != ScalarType::Float || output_width(params) > INT_MAX ||
      executorch::runtime::resize_tensor(out, {shape, 3}) != executorch::runtime::Error::Ok) {
    return "The attention's output has not the shape of the query's tokens and its values.";
  }
  params.output = out.mutable_data_ptr<float>();
  if (const char* unsound = attention_error(params)) return unsound;
  if (running_call) {
    for (const OperatorInput cache : {kCache, kValueCache, kCacheScale, kValueCacheScale}) {
      if (!is_cache(*running_call, inputs[cache]))
        return "The attention's cache is none of the session's.";
    }
    if (!is_planned(*running_call, out))
      return "The attention's output is not in the program's buffers.";
  }

  size_t threads = running_call ? running_call->threads
                                : static_cast<size_t>(executorch::extension::get_thread_count());
  const std::unique_ptr<void, void (*)(void*)> workspace(
      std::malloc(attention_workspace_bytes(params, threads) + 1), std::free);  // never of 0 bytes
  if (!workspace) return "There is no memory for the attention's workspace.";
  attention(params, workspace.get(), threads, {parallel_for, &threads});
  return "";
}

// Nothing may be thrown into ExecuTorch.
template <size_t N>
void run(KernelRuntimeContext& context, Span<EValue*> arguments,
         const OperatorInput (&order)[N]) noexcept {
  const RunningCall* call = running_call;
  if (call && call->stop && call->stop->load(std::memory_order_relaxed)) {
    context.fail(executorch::runtime::Error::Internal);
    return;
  }
  // The inner one: a sentence needs memory too. Without it the status alone says what happened.
  try {
    const auto fail = [&](std::string failure) {
      context.fail(executorch::runtime::Error::InvalidArgument);
      if (call && call->failure) *call->failure = std::move(failure);
    };
    try {
      const std::string failure = compute(arguments, order, N);
      if (!failure.empty()) fail(failure);
    } catch (const Aborted& aborted) {
      fail(std::string(aborted.what()) + ".");
    }
  } catch (...) {
    context.fail(executorch::runtime::Error::MemoryAllocationFailed);
  }
}

void kernel(KernelRuntimeContext& context, Span<EValue*> arguments) noexcept {
  run(context, arguments, kInputs);
}

void read_kernel(KernelRuntimeContext& context, Span<EValue*> arguments) noexcept {
  run(context, arguments, kReadInputs);
}

}  // namespace

void register_attention() {
  using executorch::runtime::Kernel;
  static const Kernel kernels[] = {Kernel(kName, kernel), Kernel(kReadName, read_kernel)};
  // Aborts where the registry is full, which the wheel's has room not to be.
  static const auto registered = executorch::runtime::register_kernels({kernels, std::size(kernels)});
  (void)registered;
}

}  // namespace edge_qkv::et
