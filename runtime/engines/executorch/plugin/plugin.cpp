// The library's one function, and what is common to its calls: a lock, threads, errors as statuses.
#include "engines/executorch/plugin.h"

#include <dlfcn.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>

#include "attention_op.h"
#include "core/error.h"
#include "log.h"
#include "program.h"

// Exported by ExecuTorch's library; its header does not come with the package.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace edge_qkv::et {

struct PluginModel {
  PluginModel(const PluginRequest& request, bool shares) : shares_pool(shares), program(request) {}
  const bool shares_pool;  // evaluates with ExecuTorch's pool; else with the caller's thread alone
  LoadedProgram program;
};

namespace {

namespace threadpool = executorch::extension::threadpool;

#if defined(__APPLE__)
constexpr const char* kQuantizedKernels = "libexecutorch_kernels_quantized.dylib";
#else
constexpr const char* kQuantizedKernels = "libexecutorch_kernels_quantized.so";
#endif

// Over ExecuTorch, whose pool, packed weights and workspaces belong to the process.
std::mutex& process_mutex() {
  static auto& mutex = *new std::mutex;  // never destroyed: threads may outlive the statics
  return mutex;
}

int models_on_pool = 0;

void copy_message(const char* sentence, PluginMessage* message) {
  std::strncpy(message->text, sentence, sizeof message->text - 1);
  message->text[sizeof message->text - 1] = '\0';
}

template <class Function>
int guarded(PluginMessage* message, Function function) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(process_mutex());
    const LogGuard log;
    function();
    return EQKV_OK;
  } catch (const Error& error) {
    copy_message(error.what(), message);
    return error.status();
  } catch (const std::bad_alloc&) {
    copy_message("There is not enough memory.", message);
    return EQKV_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    copy_message(error.what(), message);
    return EQKV_ENGINE_FAILED;
  } catch (...) {
    copy_message("An unknown error occurred.", message);
    return EQKV_ENGINE_FAILED;
  }
}

void start() {
  executorch::runtime::runtime_init();
  register_attention();
  // The library that PyTorch's side of ExecuTorch loads has the same kernels: a process must not load
  // both.
  if (!executorch::runtime::registry_has_op_function("quantized_decomposed::embedding_4bit.out")) {
    dlopen(kQuantizedKernels, RTLD_NOW | RTLD_LOCAL);  // where it is missing, so will the operator be
  }
  forget_logged();
}

// A program is compiled for the pool that there is: it cannot change below one that is loaded.
void use_threads(int threads) {
  threadpool::ThreadPool* pool = threadpool::get_threadpool();
  const size_t now = pool ? pool->get_thread_count() : 1;
  if (now == static_cast<size_t>(threads)) return;
  if (models_on_pool > 0) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "ExecuTorch has one pool of threads for a process: a model that is open uses " +
                    std::to_string(now) + ", this one asks for " + std::to_string(threads) +
                    "; ask for as many (or for 1), or close that model first.");
  }
  if (!pool || !pool->_unsafe_reset_threadpool(static_cast<uint32_t>(threads))) {
    throw Error(EQKV_ENGINE_FAILED, "ExecuTorch cannot start " + std::to_string(threads) + " threads.");
  }
}

// With one thread, that of the caller.
std::optional<threadpool::NoThreadPoolGuard> guard(bool shares_pool) {
  std::optional<threadpool::NoThreadPoolGuard> alone;
  if (!shares_pool) alone.emplace();
  return alone;
}

int open(const PluginRequest& request, PluginModel** model, PluginMessage* message) {
  return guarded(message, [&] {
    static const bool started = (start(), true);
    (void)started;
    const bool shares_pool = request.threads > 1;
    if (shares_pool) use_threads(request.threads);
    const auto alone = guard(shares_pool);
    *model = new PluginModel(request, shares_pool);
    models_on_pool += shares_pool ? 1 : 0;
  });
}

int forward(PluginModel* model, const PluginCall& call, PluginMessage* message) {
  return guarded(message, [&] {
    const auto alone = guard(model->shares_pool);
    model->program.forward(call);
  });
}

void release_pages(PluginModel* model) {
  PluginMessage ignored;
  guarded(&ignored, [&] { model->program.release_pages(); });
}

void close(PluginModel* model) {
  PluginMessage ignored;
  guarded(&ignored, [&] {
    models_on_pool -= model->shares_pool ? 1 : 0;
    delete model;
  });
}

constexpr Plugin kPlugin = {
    kPluginInterface, EDGE_QKV_EXECUTORCH_VERSION, open, forward, release_pages, close};

}  // namespace
}  // namespace edge_qkv::et

extern "C" __attribute__((visibility("default"))) const edge_qkv::et::Plugin* eqkv_executorch_plugin() {
  return &edge_qkv::et::kPlugin;
}

extern "C" __attribute__((visibility("default"))) const char* eqkv_executorch_version() {
  return EDGE_QKV_EXECUTORCH_VERSION;
}
