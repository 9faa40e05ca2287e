// A loaded program: its method, the memory it works in, and one evaluation at a time.
#pragma once

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>

#include <memory>
#include <string>
#include <vector>

#include "core/file.h"
#include "engines/executorch/plugin.h"

namespace edge_qkv::et {

// Address space for the buffers that a program's planner laid out. Pages are in RAM once they are used.
class PlannedBuffer {
 public:
  explicit PlannedBuffer(size_t bytes);  // throws Error
  ~PlannedBuffer();
  PlannedBuffer(PlannedBuffer&& other) noexcept;
  PlannedBuffer& operator=(PlannedBuffer&&) = delete;
  executorch::runtime::Span<uint8_t> span() const { return {data_, bytes_}; }
  void release() const;

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Throws Error. What a file says is checked by pte_file.h, by ExecuTorch's loader, here and by our
// operator. What ExecuTorch's own operators and XNNPACK do with tensors that contradict each other is
// not: about one program in two thousand with random damage still ends the process.
class LoadedProgram {
 public:
  explicit LoadedProgram(const PluginRequest& request);

  void forward(const PluginCall& call);
  void release_workspace() const;
  bool took_packed() const { return took_packed_; }

 private:
  void load(const PluginRequest& request);
  void plan_memory();
  void load_method(const PluginRequest& request);
  void evaluate(const PluginCall& call);
  void check_interface();
  void find_caches();

  const std::string path_;
  const CacheLayout layout_;
  const int64_t cache_rows_, vocab_size_, prefill_chunk_;
  const int threads_;
  const PlannedBuffer logits_;  // [prefill_chunk, vocab_size]
  bool took_packed_ = false;
  bool broken_ = false;  // its method was left in the middle of an evaluation
  // Members below use those above them.
  File packed_;  // held while it is mapped
  std::unique_ptr<executorch::extension::MmapDataLoader> loader_;
  std::unique_ptr<executorch::runtime::Program> program_;
  std::vector<PlannedBuffer> buffers_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  executorch::extension::MallocMemoryAllocator method_memory_, temporary_memory_;
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_memory_;
  std::unique_ptr<executorch::runtime::MemoryManager> memory_;
  std::unique_ptr<executorch::runtime::Method> method_;
  std::vector<executorch::aten::TensorImpl*> caches_;  // as in layout.tensors, the method's
  std::vector<int64_t> ids_, rows_;                    // [T], [R] of the call
};

}  // namespace edge_qkv::et
