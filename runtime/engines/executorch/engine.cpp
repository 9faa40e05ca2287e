#include "engine.h"

#include <atomic>
#include <vector>

#include "core/error.h"
#include "core/file.h"
#include "core/memory.h"
#include "costs.h"
#include "engines/packed.h"
#include "library.h"

namespace edge_qkv::et {
namespace {

// A program that the plugin has loaded. Throws Error.
class Program {
 public:
  Program(const Plugin& plugin, const ModelInfo& info, const std::string& packed, PackedFile what,
          int threads)
      : plugin_(plugin) {
    const Description& model = info.description;
    const PluginRequest request = {info.path.c_str(),
                                   packed.empty() ? nullptr : packed.c_str(),
                                   what,
                                   threads,
                                   info.layout.type,
                                   info.layout.tensors.data(),
                                   info.layout.tensors.size(),
                                   model.cache_rows,
                                   model.vocab_size,
                                   model.prefill_chunk};
    PluginMessage message = {};
    check(plugin_.open(request, &model_, &message), message);
  }
  ~Program() {
    if (model_) plugin_.close(model_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void forward(const PluginCall& call) const {
    PluginMessage message = {};
    check(plugin_.forward(model_, call, &message), message);
  }
  bool took_packed() const { return plugin_.took_packed(model_); }
  void release_workspace() const { plugin_.release_workspace(model_); }

 private:
  static void check(int status, const PluginMessage& message) {
    if (status != EQKV_OK) throw Error(static_cast<eqkv_status>(status), message.text);
  }

  const Plugin& plugin_;
  PluginModel* model_ = nullptr;
};

class State : public EngineState {
 public:
  State(const Program& program, const CacheView& cache) : program_(program), caches_(cache.tensors) {}

  void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
               float* logits) override {
    program_.forward({tokens, count, past, logit_rows, logits, caches_.data(), &stop_});
  }
  void interrupt() noexcept override { stop_ = true; }
  void resume() noexcept override { stop_ = false; }

 private:
  const Program& program_;
  const std::vector<std::byte*> caches_;
  std::atomic<bool> stop_{false};
};

class Model : public EngineModel {
 public:
  Model(const Plugin& plugin, const ModelInfo& info, const std::string& packed, int threads)
      : info_(info),
        directories_{absolute_directory(info.path)},
        program_(plugin, info, packed, PackedFile::kRead, threads) {
    if (!packed.empty()) directories_.push_back(absolute_directory(packed));
    info_.packed = program_.took_packed() && is_mapped(packed);
    release_heap();  // what loading allocated and freed is no memory of ours any more
  }
  const ModelInfo& info() const override { return info_; }
  void release_workspace() const override { program_.release_workspace(); }
  void release_pages() const override {
    for (const std::string& directory : directories_) release_file_pages(directory);
  }
  std::unique_ptr<EngineState> open(const CacheView& cache) const override {
    return std::make_unique<State>(program_, cache);
  }

 private:
  ModelInfo info_;
  std::vector<std::string> directories_;  // absolute: of the files that weights are mapped from
  const Program program_;
};

PackedWeights packed_weights(const EngineOptions& options, const ModelInfo& info, const Plugin& plugin) {
  return PackedWeights(options.packed_weights, info, std::string("executorch ") + plugin.executorch,
                       {"packed.xnnpack"});
}

}  // namespace

std::unique_ptr<EngineModel> load_pte(const ModelInfo& info, const EngineOptions& options) {
  const Plugin& plugin = open_plugin(options.library);
  const std::string packed =
      options.packed_weights.empty() ? "" : packed_weights(options, info, plugin).find();
  return std::make_unique<Model>(plugin, info, packed, options.threads);
}

void pack_pte(const ModelInfo& info, const EngineOptions& options) {
  if (options.packed_weights.empty()) {
    throw Error(EQKV_INVALID_ARGUMENT, "packed_weights names no directory for the packed weights.");
  }
  const Plugin& plugin = open_plugin(options.library);
  // The thread of the caller is enough, as XNNPACK packs
  // with no more, and the pool may have another size.
  const auto load = [&](const std::string& file, PackedFile what) {
    const Program program(plugin, info, file, what, 1);
    return program.took_packed() && is_mapped(file);
  };
  packed_weights(options, info, plugin)
      .make(packed_file_bytes(info.description), [&](const std::string& file) {
        load(file, PackedFile::kWrite);
        if (!load(file, PackedFile::kRead)) {
          throw Error(EQKV_ENGINE_FAILED, "ExecuTorch does not map what it wrote.");
        }
      });
}

bool is_packed(const ModelInfo& info, const EngineOptions& options) {
  if (!PackedWeights::any(options.packed_weights, info)) return false;  // without opening a library
  return !packed_weights(options, info, open_plugin(options.library)).find().empty();
}

}  // namespace edge_qkv::et
