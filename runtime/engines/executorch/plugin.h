// Between libedge_qkv and libedge_qkv_executorch: all that is compiled against ExecuTorch lies behind
// this interface, in a library of its own, so that the runtime neither ships nor needs ExecuTorch.
//
// Both are built from one tree by one compiler. No exception crosses it, and of the C++ library only
// types that are no more than a number.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/layout.h"

namespace edge_qkv::et {

// Grows with every change of this file or of CacheTensor.
constexpr int kPluginInterface = 3;
constexpr const char* kPluginFunction = "eqkv_executorch_plugin";

// Of every sentence that says why there is no engine.
constexpr const char* kInstallRemedy =
    "; install the Python package executorch and then edge-qkv once more from its sources (pip install "
    "--force-reinstall --no-deps .), or build with -DEDGE_QKV_EXECUTORCH=ON";

struct PluginModel;  // a loaded program

// What becomes of PluginRequest::packed.
enum class PackedFile : int {
  kRead,   // its weights are used, if they can be
  kWrite,  // it is made, which fails where any part of it fails
};

struct PluginMessage {
  char text[1024];  // one sentence; set where a function fails
};

struct PluginRequest {
  const char* path;    // of the program
  const char* packed;  // file of packed weights; null: none
  PackedFile packed_file;
  int threads;
  CacheType cache_type;
  const CacheTensor* tensors;  // [tensor_count]: what the program must have
  size_t tensor_count;
  int64_t cache_rows;
  int64_t vocab_size;
  int64_t prefill_chunk;
};

struct PluginCall {
  const int32_t* tokens;  // [count]
  size_t count;
  int64_t past;
  size_t logit_rows;              // R
  float* logits;                  // [R, vocab_size]
  std::byte* const* caches;       // [tensor_count], with cache_rows rows each
  const std::atomic<bool>* stop;  // once true, the call fails as soon as it can
};

// Functions that can fail return an eqkv_status. A model is used by any number of threads: calls wait
// for each other, for a program has one set of buffers and ExecuTorch one thread pool.
struct Plugin {
  int interface;
  const char* executorch;  // the version it was built with
  int (*open)(const PluginRequest& request, PluginModel** model, PluginMessage* message);
  int (*forward)(PluginModel* model, const PluginCall& call, PluginMessage* message);
  // Whether the loaded program was given the weights of its file of packed ones, all as they are there;
  // whether that was mapped, the caller sees.
  bool (*took_packed)(const PluginModel* model);
  // Gives back the pages of buffers, whose contents are not kept between calls; of none while a call of
  // any model runs.
  void (*release_workspace)(PluginModel* model);
  void (*close)(PluginModel* model);
};

}  // namespace edge_qkv::et
