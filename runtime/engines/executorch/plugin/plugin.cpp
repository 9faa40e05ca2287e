// What the library exports, and what is common to its calls: a lock, threads, errors as statuses.
#include "engines/executorch/plugin.h"

#include <dlfcn.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>

#include "attention_op.h"
#include "core/error.h"
#include "core/message.h"
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

// Why the operators of kQuantizedKernels are missing; empty where they are not.
std::string& missing_kernels() {
  static auto& why = *new std::string;
  return why;
}

int keep(eqkv_status status, const char* sentence, PluginMessage* message) {
  copy_message(sentence, message->text, sizeof message->text);
  return status;
}

template <class Function>
int caught(PluginMessage* message, Function function) noexcept {
  try {
    function();
    return EQKV_OK;
  } catch (const Error& error) {
    return keep(error.status(), error.what(), message);
  } catch (const std::bad_alloc&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.", message);
  } catch (const std::length_error&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.", message);
  } catch (const std::exception& error) {
    return keep(EQKV_ENGINE_FAILED, error.what(), message);
  } catch (...) {
    return keep(EQKV_ENGINE_FAILED, "An unknown error occurred.", message);
  }
}

template <class Function>
int guarded(PluginMessage* message, Function function) noexcept {
  return caught(message, [&] {
    const std::lock_guard<std::mutex> lock(process_mutex());
    const LogGuard log;
    function();
  });
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(EQKV_ENGINE_MISSING,
              "The ExecuTorch engine cannot be opened: " + why + kInstallRemedy + ".");
}

// Of ExecuTorch's library, with a slash at its end; or empty.
std::string executorch_directory() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&executorch::runtime::runtime_init), &info) == 0 ||
      !info.dli_fname) {
    return "";
  }
  const std::string file = info.dli_fname;
  return file.substr(0, file.rfind('/') + 1);
}

std::string without_build(const std::string& version) { return version.substr(0, version.find('+')); }

// The classes of ExecuTorch are compiled into this library as its headers have them: those of another
// version would be read as what they are not. Installed as a Python package it says which it is.
void check_version() {
  const std::string folder = executorch_directory(), built = EDGE_QKV_EXECUTORCH_VERSION;
  std::ifstream file(folder + "../version.py");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("__version__ = ", 0) != 0) continue;
    const size_t begin = line.find_first_of("'\""), end = line.find_last_of("'\"");
    if (begin == end) return;
    const std::string found = line.substr(begin + 1, end - begin - 1);
    if (without_build(found) == without_build(built)) return;
    refuse("it was built with ExecuTorch " + built + ", and the one in " + folder + " is " + found);
  }
}

// Why `library` cannot be opened, or empty.
std::string open_library(const std::string& library) {
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) return "";
  const char* why = dlerror();
  return why ? why : library;
}

void start() {
  executorch::runtime::runtime_init();
  register_attention();
  // The library that PyTorch's side of ExecuTorch loads
  // has the same kernels: a process must not load both.
  if (!executorch::runtime::registry_has_op_function("quantized_decomposed::embedding_4bit.out")) {
    missing_kernels() = open_library(executorch_directory() + kQuantizedKernels);
  }
  forget_logged();
}

std::unique_ptr<PluginModel> load(const PluginRequest& request, bool shares_pool) {
  try {
    return std::make_unique<PluginModel>(request, shares_pool);
  } catch (const Error& error) {
    if (missing_kernels().empty() || !std::strstr(error.what(), "quantized_decomposed::")) throw;
    refuse(missing_kernels());
  }
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
  if (const int status = caught(message, check_version)) return status;  // before anything is called
  return guarded(message, [&] {
    static const bool started = (start(), true);
    (void)started;
    const bool shares_pool = request.threads > 1;
    if (shares_pool) use_threads(request.threads);
    const auto alone = guard(shares_pool);
    *model = load(request, shares_pool).release();
    models_on_pool += shares_pool ? 1 : 0;
  });
}

int forward(PluginModel* model, const PluginCall& call, PluginMessage* message) {
  return guarded(message, [&] {
    const auto alone = guard(model->shares_pool);
    model->program.forward(call);
  });
}

bool took_packed(const PluginModel* model) { return model->program.took_packed(); }

void release_workspace(PluginModel* model) {
  // Whoever trims does not wait for an evaluation: what it uses comes back at once anyway.
  const std::unique_lock<std::mutex> lock(process_mutex(), std::try_to_lock);
  if (lock) model->program.release_workspace();
}

void close(PluginModel* model) {
  PluginMessage ignored;
  guarded(&ignored, [&] {
    models_on_pool -= model->shares_pool ? 1 : 0;
    delete model;
  });
}

constexpr Plugin kPlugin = {kPluginInterface, EDGE_QKV_EXECUTORCH_VERSION, open, forward,
                            took_packed,      release_workspace,           close};

}  // namespace
}  // namespace edge_qkv::et

extern "C" __attribute__((visibility("default"))) const edge_qkv::et::Plugin* eqkv_executorch_plugin() {
  return &edge_qkv::et::kPlugin;
}

// For programs that others load with ExecuTorch's own runtime: makes our operator known to it, and
// nothing else. An eqkv_status.
extern "C" __attribute__((visibility("default"))) int eqkv_executorch_register() {
  using namespace edge_qkv::et;
  PluginMessage ignored;
  if (const int status = caught(&ignored, check_version)) return status;
  return guarded(&ignored, register_attention);
}
