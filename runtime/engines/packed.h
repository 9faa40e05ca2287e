// Packed weights: what an engine makes of a model's matrices when it loads them, in the order that the
// kernels of this processor read. Mapped from a file they are no anonymous memory, and nothing is left
// to do when they are loaded.
//
// The directory that a user names holds a directory for each model, version of an engine and processor:
//   packed-FINGERPRINT-HASH/...         the engine's files
//                           packed.txt  written last: what it was made of and by, the files' sizes and
//                                       the checksums of their ends
//   .lock                               held while one is written
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/engine.h"

namespace edge_qkv {

class PackedWeights {
 public:
  // In `directory`, of the model that `info` describes, by an
  // engine ("onnxruntime 1.32.0"), in files of these names.
  PackedWeights(const std::string& directory, const ModelInfo& info, const std::string& engine,
                const std::vector<std::string>& files);

  // Whether `directory` holds anything for a model, for whatever runtime and processor.
  static bool any(const std::string& directory, const ModelInfo& info);

  // Path of the first file, where all is there and, as far as the marker tells, as it was written; else
  // empty. The marker tells damage, not malice: who can write there can make an engine read anywhere.
  std::string find() const;

  // Calls write(path) to write the first file to `path` and the others beside it, in a directory that
  // gets its name when all is on the disk. Does nothing where `find` finds it, also when another process
  // wrote it meanwhile. Throws Error. `bytes_needed` is an estimate.
  void make(uint64_t bytes_needed, const std::function<void(const std::string& path)>& write) const;

 private:
  std::string described(const std::string& folder) const;
  void write_marker(const std::string& folder) const;

  const std::string directory_;
  const std::vector<std::string> files_;
  const std::string maker_;  // lines of the marker before those of the files
  const std::string final_;  // the directory of this model
};

}  // namespace edge_qkv
