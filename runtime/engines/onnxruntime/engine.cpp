#include "engine.h"

#include "core/error.h"
#include "core/file.h"
#include "core/memory.h"
#include "costs.h"
#include "custom_op.h"
#include "engines/packed.h"
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

PackedWeights packed_weights(const EngineOptions& options, const ModelInfo& info,
                             const Library& library) {
  return PackedWeights(options.packed_weights, info, "onnxruntime " + library.version(),
                       {"packed.onnx", "packed.onnx.data"});  // both forms of the weights; one is read
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

Handle<OrtSession> create_session(const Library& library, const std::string& path,
                                  const OrtSessionOptions* options, eqkv_status status) {
  const Api& api = library.api();
  return make_handle<OrtSession>(api.ReleaseSession, [&](auto** out) {
    check(api, api.CreateSession(library.env(), path.c_str(), options, out), status,
          path + " cannot be loaded");
  });
}

std::unique_ptr<EngineModel> load(const Library& library, const ModelInfo& info, int threads) {
  const auto options = session_options(library, threads);
  auto session = create_session(library, info.path, options.get(), EQKV_BAD_PACKAGE);
  check_graph(library, session.get(), info);
  release_heap();  // what loading allocated and freed is no memory of ours any more
  return std::make_unique<Model>(LoadedGraph{library, std::move(session), info, graph_names(info)},
                                 absolute_directory(info.path));
}

}  // namespace

std::unique_ptr<EngineModel> load_onnx(const ModelInfo& info, const EngineOptions& options) {
  const Library& library = Library::open(options.library);
  if (!options.packed_weights.empty()) {
    const std::string packed = packed_weights(options, info, library).find();
    try {
      ModelInfo of_packed = packed.empty() ? ModelInfo{} : describe_onnx(packed);
      if (of_packed.fingerprint == info.fingerprint && of_packed.text == info.text) {
        of_packed.packed = true;
        return load(library, of_packed, options.threads);
      }
    } catch (const Error&) {
      // Damaged although its sizes are right: the package itself is still there.
    }
  }
  return load(library, info, options.threads);
}

void pack_onnx(const ModelInfo& info, const EngineOptions& options) {
  const Library& library = Library::open(options.library);
  const Api& api = library.api();
  packed_weights(options, info, library)
      .make(packed_file_bytes(info.description), [&](const std::string& graph) {
        const auto opts = session_options(library, options.threads);
        const auto set = [&](const char* key, const std::string& value) {
          check(api, api.AddSessionConfigEntry(opts.get(), key, value.c_str()), EQKV_ENGINE_FAILED,
                "ONNX Runtime refused an option");
        };
        // The weights' file is named relative to the graph.
        set("session.optimized_model_external_initializers_file_name",
            graph.substr(graph.rfind('/') + 1) + ".data");
        set("session.optimized_model_external_initializers_min_size_in_bytes", "1024");
        set("session.save_external_prepacked_constant_initializers", "1");
        check(api, api.SetOptimizedModelFilePath(opts.get(), graph.c_str()), EQKV_ENGINE_FAILED,
              "ONNX Runtime refused an option");
        create_session(library, info.path, opts.get(), EQKV_BAD_PACKAGE);
        // A disk that fills up goes unnoticed while it is written; what was cut off does not load.
        const auto plain = session_options(library, options.threads);
        create_session(library, graph, plain.get(), EQKV_ENGINE_FAILED);
      });
}

bool is_packed(const ModelInfo& info, const EngineOptions& options) {
  if (!PackedWeights::any(options.packed_weights, info)) return false;  // without opening a library
  return !packed_weights(options, info, Library::open(options.library)).find().empty();
}

}  // namespace edge_qkv::ort
