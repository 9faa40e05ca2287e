#include "engine.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "onnxruntime/costs.h"
#include "onnxruntime/engine.h"
#include "onnxruntime/model_file.h"

namespace edge_qkv {
namespace {

constexpr const char* kOnnxFile = "model.onnx";
constexpr int kMostThreads = 256;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(EQKV_BAD_PACKAGE, path + ": " + why + ".");
}

// The model file of a package directory, or the file itself.
std::string find_model_file(const std::string& path) {
  struct stat status = {};
  if (path.empty()) throw Error(EQKV_INVALID_ARGUMENT, "The path of the model is empty.");
  if (stat(path.c_str(), &status) != 0) refuse(path, std::strerror(errno));
  std::string file = path;
  if (S_ISDIR(status.st_mode)) {
    file += (file.back() == '/' ? "" : "/") + std::string(kOnnxFile);
    if (stat(file.c_str(), &status) != 0)
      refuse(path, "is not a package: it holds no " + std::string(kOnnxFile));
  }
  if (!S_ISREG(status.st_mode)) refuse(file, "is not a file");
  if (access(file.c_str(), R_OK) != 0) refuse(file, std::strerror(errno));
  return file;
}

}  // namespace

int resolved_threads(int threads) {
  if (threads < 0 || threads > kMostThreads) {
    throw Error(EQKV_INVALID_ARGUMENT, "The number of threads must be from 0 (one for each core) to " +
                                           std::to_string(kMostThreads) + ".");
  }
  if (threads > 0) return threads;
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

ModelDescription describe_model(const std::string& path) {
  return ort::describe_onnx(find_model_file(path));
}

const PlanEngine& plan_engine() { return ort::kPlanEngine; }

std::unique_ptr<EngineModel> open_model(const std::string& path, const EngineOptions& options) {
  EngineOptions resolved = options;
  resolved.threads = resolved_threads(options.threads);
  return ort::open_onnx(find_model_file(path), resolved);
}

void pack_model(const std::string& path, const EngineOptions& options) {
  EngineOptions resolved = options;
  resolved.threads = resolved_threads(options.threads);
  ort::pack_onnx(find_model_file(path), resolved);
}

bool model_is_packed(const std::string& path, const EngineOptions& options) {
  return !options.packed_weights.empty() && ort::is_packed(find_model_file(path), options);
}

}  // namespace edge_qkv
