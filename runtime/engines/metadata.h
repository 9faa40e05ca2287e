// The texts that every model file of ours holds beside its graph, whatever its engine.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/engine.h"

namespace edge_qkv {

inline constexpr const char* kDescriptionKey = "edge_qkv.description";  // see core/description.h
inline constexpr const char* kFingerprintKey = "edge_qkv.fingerprint";

// The longest of them.
inline constexpr uint64_t kMostMetadataBytes = 1 << 16;

inline bool is_metadata(const std::string& key) {
  return key == kDescriptionKey || key == kFingerprintKey;
}

// A model file as far as it can be read without its engine.
struct FileMetadata {
  std::map<std::string, std::string> texts;  // by key, unchecked
  uint64_t bytes = 0;                        // of the file and of the weights beside it
};

// The model in the file at `path`. Throws Error with EQKV_BAD_PACKAGE.
ModelInfo model_info(const FileMetadata& file, const std::string& path, const char* engine);

}  // namespace edge_qkv
