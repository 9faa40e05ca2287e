#include "engine.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "core/error.h"
#include "onnxruntime/engine.h"

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

std::unique_ptr<EngineModel> open_model(const std::string& path, const EngineOptions& options) {
  EngineOptions resolved = options;
  if (options.threads < 0 || options.threads > kMostThreads) {
    throw Error(EQKV_INVALID_ARGUMENT, "The number of threads must be from 0 (one for each core) to " +
                                           std::to_string(kMostThreads) + ".");
  }
  if (options.threads == 0) {
    resolved.threads =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
  }
  return ort::open_onnx(find_model_file(path), resolved);
}

}  // namespace edge_qkv
