#include "engine.h"

#include <cstdlib>

#include "core/error.h"
#include "core/memory.h"
#include "custom_op.h"
#include "state.h"

namespace edge_qkv::ort {
namespace {

class Model : public EngineModel {
 public:
  Model(LoadedGraph graph, std::string directory)
      : graph_(std::move(graph)), directory_(std::move(directory)) {}
  const ModelInfo& info() const override { return graph_.info; }
  void release_pages() const override { release_file_pages(directory_); }
  std::unique_ptr<EngineState> open(const CacheView& cache) const override {
    return std::make_unique<State>(graph_, cache);
  }

 private:
  const LoadedGraph graph_;
  const std::string directory_;  // absolute: of the files that weights are mapped from
};

// Of the file at `path`, with a slash at its end.
std::string absolute_directory(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> whole(realpath(path.c_str(), nullptr), std::free);
  const std::string resolved = whole ? whole.get() : path;
  return resolved.substr(0, resolved.rfind('/') + 1);
}

Handle<OrtSessionOptions> session_options(const Library& library, int threads) {
  const Api& api = library.api();
  const auto call = [&](OrtStatus* result) {
    check(api, result, EQKV_ENGINE_FAILED, "ONNX Runtime refused an option");
  };
  auto options = make_handle<OrtSessionOptions>(
      api.ReleaseSessionOptions, [&](auto** out) { call(api.CreateSessionOptions(out)); });
  // Errors come back as a status; they need no second line on the terminal.
  call(api.SetSessionLogSeverityLevel(options.get(), kLogFatal));
  call(api.SetSessionExecutionMode(options.get(), kSequential));
  call(api.SetIntraOpNumThreads(options.get(), threads));
  call(api.SetInterOpNumThreads(options.get(), 1));
  // Memory of one call is not kept for the next: an arena grows to the largest prefill and stays there,
  // and patterns are planned for shapes that change with every call.
  call(api.DisableCpuMemArena(options.get()));
  call(api.DisableMemPattern(options.get()));
  call(add_attention_op(library.table(), options.get(), threads));
  return options;
}

}  // namespace

std::unique_ptr<EngineModel> open_onnx(const std::string& path, const EngineOptions& options) {
  const Library& library = Library::open(options.library);
  const Api& api = library.api();
  const auto session_opts = session_options(library, options.threads);
  auto session = make_handle<OrtSession>(api.ReleaseSession, [&](auto** out) {
    check(api, api.CreateSession(library.env(), path.c_str(), session_opts.get(), out), EQKV_BAD_PACKAGE,
          path + " cannot be loaded");
  });
  const ModelInfo info = read_model_info(library, session.get(), path);
  return std::make_unique<Model>(LoadedGraph{library, std::move(session), info, graph_names(info)},
                                 absolute_directory(path));
}

}  // namespace edge_qkv::ort
