#include "engines.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "core/error.h"
#include "core/processors.h"
#include "executorch/costs.h"
#include "executorch/engine.h"
#include "executorch/model_file.h"
#include "onnxruntime/costs.h"
#include "onnxruntime/engine.h"
#include "onnxruntime/model_file.h"

namespace edge_qkv {
namespace {

struct Engine {
  const char* name;        // ModelInfo::engine of its models
  const char* model_file;  // of a package; all its model files have this ending
  const PlanEngine* plan;
  ModelInfo (*describe)(const std::string& path);
  std::unique_ptr<EngineModel> (*load)(const ModelInfo& info, const EngineOptions& options);
  void (*pack)(const ModelInfo& info, const EngineOptions& options);
  bool (*is_packed)(const ModelInfo& info, const EngineOptions& options);
};

constexpr Engine kEngines[] = {
    {"onnxruntime", "model.onnx", &ort::kPlanEngine, ort::describe_onnx, ort::load_onnx, ort::pack_onnx,
     ort::is_packed},
    {"executorch", "model.pte", &et::kPlanEngine, et::describe_pte, et::load_pte, et::pack_pte,
     et::is_packed},
};

constexpr int kMostThreads = 256;

// "a, b or c": text(engine) of each engine.
template <class Text>
std::string any_of_engines(Text text) {
  std::string words;
  for (const Engine& engine : kEngines) {
    const bool last = &engine == std::end(kEngines) - 1;
    words += (words.empty() ? "" : last ? " or " : ", ") + std::string(text(engine));
  }
  return words;
}

const char* model_file(const Engine& engine) { return engine.model_file; }
const char* ending(const Engine& engine) { return std::strrchr(engine.model_file, '.'); }

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(EQKV_BAD_PACKAGE, path + ": " + why + ".");
}

struct ModelFile {
  const Engine* engine = nullptr;
  std::string path;
};

ModelFile in_directory(const std::string& path) {
  ModelFile found;
  for (const Engine& engine : kEngines) {
    const std::string file = path + (path.back() == '/' ? "" : "/") + engine.model_file;
    struct stat status = {};
    if (stat(file.c_str(), &status) != 0) continue;
    if (found.engine) {
      refuse(path, "holds both " + std::string(found.engine->model_file) + " and " + engine.model_file +
                       ", and a package has one model file; export each to a directory of its own");
    }
    found = {&engine, file};
  }
  if (!found.engine) refuse(path, "is not a package: it holds no " + any_of_engines(model_file));
  return found;
}

const Engine* engine_of_file(const std::string& path) {
  for (const Engine& engine : kEngines) {
    const size_t length = std::strlen(ending(engine));
    if (path.size() > length && path.compare(path.size() - length, length, ending(engine)) == 0) {
      return &engine;
    }
  }
  refuse(path, "is not a model file, whose name ends in " + any_of_engines(ending));
}

const Engine& engine_named(const std::string& name) {
  for (const Engine& engine : kEngines) {
    if (name == engine.name) return engine;
  }
  throw Error(EQKV_INVALID_ARGUMENT,
              "engine must be " + any_of_engines([](const Engine& engine) { return engine.name; }) +
                  ", not \"" + name.substr(0, 40) + "\".");
}

EngineOptions resolved(const EngineOptions& options) {
  EngineOptions all = options;
  all.threads = resolved_threads(options.threads);
  return all;
}

// The model file of a package directory, or the file itself.
ModelFile find_model_file(const std::string& path) {
  struct stat status = {};
  if (path.empty()) throw Error(EQKV_INVALID_ARGUMENT, "The path of the model is empty.");
  if (stat(path.c_str(), &status) != 0) refuse(path, std::strerror(errno));
  ModelFile found = {nullptr, path};
  if (S_ISDIR(status.st_mode)) {
    found = in_directory(path);
    if (stat(found.path.c_str(), &status) != 0) refuse(found.path, std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) refuse(found.path, "is not a file");
  if (!found.engine) found.engine = engine_of_file(path);
  if (access(found.path.c_str(), R_OK) != 0) refuse(found.path, std::strerror(errno));
  return found;
}

}  // namespace

int resolved_threads(int threads) {
  if (threads < 0 || threads > kMostThreads) {
    throw Error(EQKV_INVALID_ARGUMENT, "The number of threads must be from 0 (one for each core) to " +
                                           std::to_string(kMostThreads) + ".");
  }
  if (threads > 0) return threads;
  return std::min(processors(), kMostThreads);
}

ModelInfo describe_model(const std::string& path) {
  const ModelFile file = find_model_file(path);
  return file.engine->describe(file.path);
}

const PlanEngine& plan_engine(const std::string& name) { return *engine_named(name).plan; }

std::unique_ptr<EngineModel> load_model(const ModelInfo& info, const EngineOptions& options) {
  return engine_named(info.engine).load(info, resolved(options));
}

void pack_model(const ModelInfo& info, const EngineOptions& options) {
  engine_named(info.engine).pack(info, resolved(options));
}

bool model_is_packed(const ModelInfo& info, const EngineOptions& options) {
  return !options.packed_weights.empty() && engine_named(info.engine).is_packed(info, options);
}

}  // namespace edge_qkv
