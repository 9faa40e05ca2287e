// One UnifiedKVAttention node of a loaded graph: reads and checks its tensors, then calls the kernel.
#pragma once

#include <cstddef>

#include "attention/attention.h"
#include "engines/operator.h"
#include "ort_api.h"

namespace edge_qkv::ort {

class AttentionNode {
 public:
  enum Output { kAttention, kCacheOut, kValueCacheOut, kCacheScaleOut, kValueCacheScaleOut, kOutputs };

  AttentionNode(const Api& api, size_t tasks) : api_(api), tasks_(tasks) {}

  // Both return null or an error that ONNX Runtime takes over. Sessions that share a model run `compute`
  // at the same time.
  OrtStatus* read_attributes(const OrtKernelInfo* info);
  OrtStatus* compute(OrtKernelContext* context) const;

  const Api& api() const { return api_; }

 private:
  const Api& api_;
  const size_t tasks_;
  AttentionParams attributes_;  // those of its fields that are attributes
};

}  // namespace edge_qkv::ort
