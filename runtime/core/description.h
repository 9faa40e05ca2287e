// The numbers and names that every model file of ours holds, whatever its engine: read from text that
// comes from outside.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "engine.h"

namespace edge_qkv {

// The texts of one model file; the messages name the file and the key. Owns neither.
class Metadata {
 public:
  Metadata(const std::map<std::string, std::string>& entries, const std::string& path)
      : entries_(entries), path_(path) {}

  // Throws Error with EQKV_BAD_PACKAGE: the file, then `why`.
  [[noreturn]] void refuse(const std::string& why) const;

  std::string required(const std::string& key) const;

  // The metadata `key`, an integer in [least, most].
  int64_t number(const std::string& key, int64_t most, int64_t least = 1) const;

  // The metadata `key`, as an index into `choices`.
  template <size_t N>
  int choice(const std::string& key, const char* const (&choices)[N]) const {
    const std::string text = required(key);
    for (size_t i = 0; i < N; ++i) {
      if (text == choices[i]) return static_cast<int>(i);
    }
    refuse_unknown(key, text);
  }

  // That `key` is the version that this library reads.
  void check_version(const std::string& key, int64_t ours) const;

 private:
  [[noreturn]] void refuse_unknown(const std::string& key, const std::string& text) const;

  const std::map<std::string, std::string>& entries_;
  const std::string& path_;
};

// The model that `metadata` describes, in files of `file_bytes`. Throws Error with EQKV_BAD_PACKAGE.
ModelDescription describe(const Metadata& metadata, const char* engine, uint64_t file_bytes);

}  // namespace edge_qkv
