// ONNX Runtime itself: opened at run time, so that we neither ship nor link it.
#pragma once

#include <string>

#include "edge_qkv.h"
#include "ort_api.h"

namespace edge_qkv::ort {

// An opened ONNX Runtime and its environment. Lives until the process ends: it has threads and statics
// that do not survive an unloading.
class Library {
 public:
  // `path`; or else the environment variable EDGE_QKV_ONNXRUNTIME; or else the system's search path.
  // The same file is opened once. Throws Error with EQKV_ENGINE_MISSING.
  static const Library& open(const std::string& path);

  const OrtApi* table() const { return table_; }
  const Api& api() const { return api_; }
  const std::string& version() const { return version_; }
  const OrtEnv* env() const { return env_; }

 private:
  Library(const OrtApi* table, std::string version);

  const OrtApi* const table_;
  const Api api_;
  const std::string version_;
  OrtEnv* env_ = nullptr;
};

// Throws Error(status, "`doing`: ONNX Runtime's message") unless `result` is null; releases it.
void check(const Api& api, OrtStatus* result, eqkv_status status, const std::string& doing);

}  // namespace edge_qkv::ort
