#include "metadata.h"

#include "core/error.h"

namespace edge_qkv {
namespace {

std::string required(const FileMetadata& file, const std::string& path, const char* key) {
  const auto found = file.texts.find(key);
  if (found != file.texts.end()) return found->second;
  throw Error(EQKV_BAD_PACKAGE, path + ": is no model of edge-qkv, or was written by an older one: it " +
                                    "has no metadata " + key + "; export the model again.");
}

}  // namespace

ModelInfo model_info(const FileMetadata& file, const std::string& path, const char* engine) {
  ModelInfo info;
  info.engine = engine;
  info.path = path;
  info.text = required(file, path, kDescriptionKey);
  info.description = read_description(info.text, path);
  info.layout = cache_layout(info.description);
  info.fingerprint = required(file, path, kFingerprintKey);
  info.file_bytes = file.bytes;
  if (info.fingerprint.size() != 64 ||
      info.fingerprint.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Error(EQKV_BAD_PACKAGE, path + ": its metadata " + kFingerprintKey +
                                      " is not 64 hexadecimal digits; export the model again.");
  }
  return info;
}

}  // namespace edge_qkv
