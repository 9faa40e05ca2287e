#include "state.h"

#include <numeric>

#include "core/error.h"

namespace edge_qkv::ort {

State::State(const LoadedGraph& graph, const CacheView& cache)
    : graph_(graph),
      api_(graph.library.api()),
      memory_info_(make_handle<OrtMemoryInfo>(
          api_.ReleaseMemoryInfo,
          [&](auto** out) { check(api_.CreateCpuMemoryInfo(kDeviceAllocator, kMemTypeDefault, out)); })),
      run_options_(make_handle<OrtRunOptions>(api_.ReleaseRunOptions,
                                              [&](auto** out) { check(api_.CreateRunOptions(out)); })) {
  // An interrupted run is no error worth a line on the terminal.
  check(api_.RunOptionsSetRunLogSeverityLevel(run_options_.get(), kLogFatal));
  for (const std::string& name : graph.names.inputs) input_names_.push_back(name.c_str());
  for (const std::string& name : graph.names.outputs) output_names_.push_back(name.c_str());
  inputs_.resize(kPlainInputs);
  outputs_.resize(kPlainOutputs);
  const CacheLayout& layout = cache.layout;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const CacheTensor& rows = layout.tensors[i];
    std::vector<int64_t> shape = {1, rows.kv_heads, cache.capacity};
    if (!rows.scales) shape.push_back(rows.dim);
    caches_.push_back(tensor(cache.tensors[i], cache.tensor_bytes(i), shape,
                             rows.scales ? kFloat16 : element_type(layout.type)));
    // The same value in and out: the operator sees one pointer and appends in place.
    inputs_.push_back(caches_.back().get());
    outputs_.push_back(caches_.back().get());
  }
}

void State::forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
                    float* logits) {
  ids_.assign(tokens, tokens + count);
  rows_.resize(logit_rows);
  std::iota(rows_.begin(), rows_.end(), static_cast<int64_t>(count - logit_rows));
  const int64_t t = static_cast<int64_t>(count), r = static_cast<int64_t>(logit_rows);
  const int64_t vocab = graph_.info.description.vocab_size;

  const auto input_ids = tensor(ids_.data(), count * sizeof ids_[0], {1, t}, kInt64);
  const auto past_rows = tensor(&past, sizeof past, {}, kInt64);
  const auto wanted = tensor(rows_.data(), logit_rows * sizeof rows_[0], {r}, kInt64);
  const auto result =
      tensor(logits, logit_rows * static_cast<size_t>(vocab) * sizeof *logits, {1, r, vocab}, kFloat);
  inputs_[0] = input_ids.get();
  inputs_[1] = past_rows.get();
  inputs_[2] = wanted.get();
  outputs_[0] = result.get();
  check(api_.Run(graph_.session.get(), run_options_.get(), input_names_.data(), inputs_.data(),
                 inputs_.size(), output_names_.data(), outputs_.size(), outputs_.data()));
}

void State::interrupt() noexcept {
  if (OrtStatus* error = api_.RunOptionsSetTerminate(run_options_.get())) api_.ReleaseStatus(error);
}

void State::resume() noexcept {
  if (OrtStatus* error = api_.RunOptionsUnsetTerminate(run_options_.get())) api_.ReleaseStatus(error);
}

// ONNX Runtime does not write through the pointer of an input.
Handle<OrtValue> State::tensor(void* data, size_t bytes, const std::vector<int64_t>& shape,
                               int type) const {
  return make_handle<OrtValue>(api_.ReleaseValue, [&](auto** out) {
    check(api_.CreateTensorWithDataAsOrtValue(memory_info_.get(), data, bytes, shape.data(),
                                              shape.size(), type, out));
  });
}

void State::check(OrtStatus* result) const {
  ort::check(api_, result, EQKV_ENGINE_FAILED, "ONNX Runtime failed");
}

}  // namespace edge_qkv::ort
