// Our attention operator as a kernel of ExecuTorch: the core's, called with the program's tensors.
#pragma once

#include <executorch/runtime/core/span.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

namespace edge_qkv::et {

// What the operator knows of the call that it runs in; of the thread that evaluates.
struct RunningCall {
  size_t threads = 1;
  const std::atomic<bool>* stop = nullptr;
  std::string* failure = nullptr;  // receives one sentence
  // All that the operator may write to: a program can name its constants, which are read-only pages.
  std::byte* const* caches = nullptr;  // [cache_count], each of the shape that was promised
  size_t cache_count = 0;
  const std::vector<executorch::runtime::Span<uint8_t>>* planned = nullptr;
};
extern thread_local const RunningCall* running_call;

class CallGuard {
 public:
  explicit CallGuard(const RunningCall& call) { running_call = &call; }
  ~CallGuard() { running_call = nullptr; }
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;
};

// Once, however often it is called: registering twice would abort.
void register_attention();

}  // namespace edge_qkv::et
