#include "description.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "core/error.h"

namespace edge_qkv {
namespace {

constexpr int64_t kFormat = 2;
constexpr int64_t kMostWeightBytes = int64_t{1} << 50;

// Text of a file in a message: short, and no control characters.
std::string printable(const std::string& text) {
  std::string out = text.substr(0, 40);
  std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; }, '?');
  return out;
}

ModelInfo read_info(const Metadata& metadata, const char* engine) {
  constexpr const char* kTypes[] = {"fp32", "fp16", "int8"};  // CacheType
  constexpr const char* kPositions[] = {"none", "learned", "rotary-conjugate", "rotary-on-read"};
  ModelInfo info;
  info.engine = engine;
  // Bounds far above any model that exists, and far below what overflows.
  info.vocab_size = metadata.number("vocab_size", 1 << 24);
  info.max_positions = metadata.number("max_positions", int64_t{1} << 31);
  info.cache.type = static_cast<CacheType>(metadata.choice("cache_type", kTypes));
  info.cache.layers = metadata.number("layers", 1 << 12);
  info.cache.caches = metadata.number("caches", 2);
  info.cache.kv_heads = metadata.number("kv_heads", 1 << 12);
  info.cache.head_dim = metadata.number("head_dim", 1 << 16);
  info.window = metadata.number("window", info.max_positions, 0);
  info.sinks = metadata.number("sinks", info.max_positions, 0);
  info.positions = static_cast<Positions>(metadata.choice("positions", kPositions));
  info.rotary_dim = metadata.number("rotary_dim", info.cache.head_dim, 0);
  info.rotary_base = std::strtod(metadata.required("rotary_base").c_str(), nullptr);
  const bool rotary =
      info.positions == Positions::kRotaryConjugate || info.positions == Positions::kRotaryOnRead;
  if (rotary && !(info.rotary_dim >= 2 && info.rotary_dim % 2 == 0 && info.rotary_base > 1 &&
                  std::isfinite(info.rotary_base))) {
    metadata.refuse("its metadata edge_qkv.rotary_dim and edge_qkv.rotary_base are no rotation.");
  }
  info.fingerprint = metadata.required("fingerprint");
  if (info.fingerprint.size() != 64 ||
      info.fingerprint.find_first_not_of("0123456789abcdef") != std::string::npos) {
    metadata.refuse("its metadata edge_qkv.fingerprint is not 64 hexadecimal digits.");
  }
  return info;
}

PlanModel read_plan_model(const Metadata& metadata, const ModelInfo& info, uint64_t file_bytes) {
  constexpr const char* kWeightBits[] = {"4", "8", "32"};
  constexpr int kBits[] = {4, 8, 32};
  PlanModel model;
  model.cache = info.cache;
  model.heads = metadata.number("heads", 1 << 12);
  model.width = metadata.number("width", 1 << 20);
  model.mlp_width = metadata.number("mlp_width", 1 << 20);
  model.mlp_matrices = metadata.number("mlp_matrices", 3, 2);
  model.vocab_size = info.vocab_size;
  model.max_positions = info.max_positions;
  model.weight_bytes = file_bytes;
  model.matrix_bytes = static_cast<uint64_t>(metadata.number("matrix_bytes", kMostWeightBytes, 0));
  model.table_bytes = static_cast<uint64_t>(metadata.number("table_bytes", kMostWeightBytes, 0));
  model.weight_bits = kBits[metadata.choice("weight_bits", kWeightBits)];
  model.block_size = static_cast<int>(metadata.number("block_size", 1 << 12, 0));
  return model;
}

}  // namespace

void Metadata::refuse(const std::string& why) const {
  throw Error(EQKV_BAD_PACKAGE, path_ + ": " + why);
}

void Metadata::refuse_unknown(const std::string& key, const std::string& text) const {
  refuse("its metadata edge_qkv." + key + " is \"" + printable(text) +
         "\", which this version does not know.");
}

std::string Metadata::required(const std::string& key) const {
  const auto found = entries_.find(key);
  if (found == entries_.end() || found->second.empty()) {
    refuse("is not an edge-qkv model: it has no metadata edge_qkv." + key + ".");
  }
  return found->second;
}

int64_t Metadata::number(const std::string& key, int64_t most, int64_t least) const {
  const std::string text = required(key);
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (errno != 0 || *end != '\0' || value < least || value > most) {
    refuse("its metadata edge_qkv." + key + " is \"" + printable(text) + "\", not a number from " +
           std::to_string(least) + " to " + std::to_string(most) + ".");
  }
  return value;
}

void Metadata::check_version(const std::string& key, int64_t ours) const {
  const int64_t theirs = number(key, 1'000'000);
  if (theirs < ours) refuse("was written by an older edge-qkv; export the model again.");
  if (theirs > ours) {
    refuse("was written by a newer edge-qkv (" + key + " " + std::to_string(theirs) +
           ", this one reads " + std::to_string(ours) +
           "); install that version or export the model again.");
  }
}

ModelDescription describe(const Metadata& metadata, const char* engine, uint64_t file_bytes) {
  metadata.check_version("format", kFormat);
  const ModelInfo info = read_info(metadata, engine);
  return {info, read_plan_model(metadata, info, file_bytes)};
}

}  // namespace edge_qkv
