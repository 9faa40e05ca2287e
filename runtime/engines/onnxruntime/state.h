// One conversation of an ONNX model: its caches, bound as input and output at once.
#pragma once

#include <string>
#include <vector>

#include "core/engine.h"
#include "handles.h"
#include "library.h"
#include "model_file.h"

namespace edge_qkv::ort {

// What all states of a model share and none changes.
struct LoadedGraph {
  const Library& library;
  Handle<OrtSession> session;
  ModelInfo info;
  GraphNames names;
};

class State : public EngineState {
 public:
  State(const LoadedGraph& graph, const CacheView& cache);

  void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
               float* logits) override;
  void interrupt() noexcept override;
  void resume() noexcept override;

 private:
  Handle<OrtValue> tensor(void* data, size_t bytes, const std::vector<int64_t>& shape, int type) const;
  void check(OrtStatus* result) const;

  const LoadedGraph& graph_;
  const Api& api_;
  Handle<OrtMemoryInfo> memory_info_;
  Handle<OrtRunOptions> run_options_;
  std::vector<Handle<OrtValue>> caches_;  // over the session's memory
  std::vector<int64_t> ids_, rows_;       // [T], [R] of the call
  // Arguments of Run: names once, values with the caches in place and the rest set by each call.
  std::vector<const char*> input_names_, output_names_;
  std::vector<const OrtValue*> inputs_;
  std::vector<OrtValue*> outputs_;
};

}  // namespace edge_qkv::ort
