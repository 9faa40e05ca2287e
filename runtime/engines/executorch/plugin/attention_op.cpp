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

constexpr const char* kName = "edge_qkv::unified_kv_attention.out";

// After the tensors; the result comes twice, as argument and as return value.
enum Attribute {
  kNumHeads = kOperatorInputs,
  kKvHeads,
  kScale,
  kRotary,
  kRotaryDim,
  kWindow,
  kSinks,
  kOut
};
constexpr size_t kArguments = kOut + 1;

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

bool read_attributes(const Span<EValue*>& arguments, AttentionParams* params) {
  const auto at = [&](Attribute index) -> const EValue& { return *arguments[index]; };
  if (!integer(at(kNumHeads), &params->num_heads) || !integer(at(kKvHeads), &params->kv_heads) ||
      !integer(at(kRotaryDim), &params->rotary_dim) || !integer(at(kWindow), &params->window) ||
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
std::string compute(const Span<EValue*>& arguments) {
  AttentionParams params;
  if (arguments.size() < kArguments || !read_attributes(arguments, &params)) {
    return "The attention's attributes are not those of this version of the operator.";
  }
  for (const EValue* argument : arguments) {
    if (!row_major(*argument)) return "The attention has a tensor that is not in row-major order.";
  }
  OperatorTensor inputs[kOperatorInputs];
  for (size_t i = 0; i < kOperatorInputs; ++i) inputs[i] = describe(*arguments[i]);
  std::string unfit = read_operator(inputs, &params);
  if (!unfit.empty()) return unfit;
  if (!arguments[kOut]->isTensor()) return "The attention has no output.";
  Tensor& out = arguments[kOut]->toTensor();
  const executorch::aten::SizesType shape[] = {
      static_cast<executorch::aten::SizesType>(inputs[kQuery].shape[0]),
      static_cast<executorch::aten::SizesType>(inputs[kQuery].shape[1]),
      static_cast<executorch::aten::SizesType>(inputs[kQuery].shape[2])};
  if (out.scalar_type() != ScalarType::Float ||
      executorch::runtime::resize_tensor(out, {shape, 3}) != executorch::runtime::Error::Ok) {
    return "The attention's output has not the query's shape.";
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
void kernel(KernelRuntimeContext& context, Span<EValue*> arguments) noexcept {
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
      const std::string failure = compute(arguments);
      if (!failure.empty()) fail(failure);
    } catch (const Aborted& aborted) {
      fail(std::string(aborted.what()) + ".");
    }
  } catch (...) {
    context.fail(executorch::runtime::Error::MemoryAllocationFailed);
  }
}

}  // namespace

void register_attention() {
  // Aborts where the registry is full, which the wheel's has room not to be.
  static const auto registered =
      executorch::runtime::register_kernel(executorch::runtime::Kernel(kName, kernel));
  (void)registered;
}

}  // namespace edge_qkv::et
