#include "library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "core/error.h"

namespace edge_qkv::ort {
namespace {

#if defined(__APPLE__)
constexpr const char* kNames[] = {"libonnxruntime.dylib", "libonnxruntime.1.dylib"};
#else
constexpr const char* kNames[] = {"libonnxruntime.so", "libonnxruntime.so.1"};
#endif

const char* last_dlerror() {
  const char* reason = dlerror();
  return reason ? reason : "no reason given";
}

void* open_shared_library(const std::string& path) {
  if (!path.empty()) {
    if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    throw Error(EQKV_ENGINE_MISSING,
                "ONNX Runtime cannot be opened: " + std::string(last_dlerror()) + ".");
  }
  for (const char* name : kNames) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return handle;
  }
  throw Error(
      EQKV_ENGINE_MISSING,
      "ONNX Runtime was not found; give the path of its shared library as engine_library or in the "
      "environment variable EDGE_QKV_ONNXRUNTIME (" +
          std::string(last_dlerror()) + ").");
}

}  // namespace

Library::Library(const OrtApi* table, std::string version)
    : table_(table), api_(table), version_(std::move(version)) {
  // Since 1.29 official builds report usage and keep a device identifier on disk, unless told otherwise
  // before they start. Who wants that sets the variable to 0.
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  check(api_, api_.CreateEnv(kLogFatal, "edge-qkv", &env_), EQKV_ENGINE_FAILED,
        "ONNX Runtime did not start");
}

const Library& Library::open(const std::string& path) {
  static std::mutex mutex;
  static auto& opened = *new std::map<void*, const Library*>;  // never destroyed, see above

  const char* variable = std::getenv("EDGE_QKV_ONNXRUNTIME");
  const std::string chosen = !path.empty() ? path : variable ? variable : "";
  const std::lock_guard<std::mutex> lock(mutex);
  void* handle = open_shared_library(chosen);
  const auto found = opened.find(handle);
  if (found != opened.end()) {
    dlclose(handle);  // one reference is enough
    return *found->second;
  }
  const auto get_api_base = reinterpret_cast<const ApiBase* (*)()>(dlsym(handle, "OrtGetApiBase"));
  const ApiBase* base = get_api_base ? get_api_base() : nullptr;
  if (!base) {
    dlclose(handle);
    throw Error(EQKV_ENGINE_MISSING, "The shared library " + chosen + " is not ONNX Runtime.");
  }
  const std::string version = base->GetVersionString();
  const OrtApi* table = base->GetApi(kApiVersion);
  if (!table) {
    throw Error(EQKV_ENGINE_MISSING, "ONNX Runtime " + version + " is too old; edge-qkv needs 1." +
                                         std::to_string(kApiVersion) + " or newer.");
  }
  const auto* library = new Library(table, version);
  opened.emplace(handle, library);
  return *library;
}

void check(const Api& api, OrtStatus* result, eqkv_status status, const std::string& doing) {
  if (!result) return;
  std::string message = api.GetErrorMessage(result);
  api.ReleaseStatus(result);
  while (!message.empty() && (message.back() == '\n' || message.back() == '.')) message.pop_back();
  throw Error(status, doing + ": " + message + ".");
}

}  // namespace edge_qkv::ort
