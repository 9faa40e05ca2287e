#include "model_file.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <map>

#include "core/error.h"
#include "onnx_file.h"

namespace edge_qkv::ort {
namespace {

constexpr int64_t kFormat = 2;
constexpr int64_t kMostWeightBytes = int64_t{1} << 50;
constexpr int64_t kAny = -1;  // a dimension that is not fixed in the graph

struct TensorType {
  int element = kUndefined;
  std::vector<int64_t> shape;
};

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(EQKV_BAD_PACKAGE, path + ": " + why);
}

// Text of a file in a message: short, and no control characters.
std::string printable(const std::string& text) {
  std::string out = text.substr(0, 40);
  std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; }, '?');
  return out;
}

class Metadata {
 public:
  Metadata(const OnnxFile& file, const std::string& path) : entries_(file.metadata), path_(path) {}

  [[noreturn]] void refuse(const std::string& why) const { ort::refuse(path_, why); }

  // The metadata `key`, an integer in [least, most].
  int64_t number(const std::string& key, int64_t most, int64_t least = 1) const {
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

  // The metadata `key`, as an index into `choices`.
  template <size_t N>
  int choice(const std::string& key, const char* const (&choices)[N]) const {
    const std::string text = required(key);
    for (size_t i = 0; i < N; ++i) {
      if (text == choices[i]) return static_cast<int>(i);
    }
    refuse("its metadata edge_qkv." + key + " is \"" + printable(text) +
           "\", which this version does not know.");
  }

  std::string required(const std::string& key) const {
    const auto found = entries_.find(key);
    if (found == entries_.end() || found->second.empty()) {
      refuse("is not an edge-qkv model: it has no metadata edge_qkv." + key + ".");
    }
    return found->second;
  }

 private:
  const std::map<std::string, std::string>& entries_;
  const std::string& path_;
};

class GraphReader {
 public:
  GraphReader(const Library& library, OrtSession* session, const std::string& path)
      : api_(library.api()), session_(session), path_(path) {
    call(api_.GetAllocatorWithDefaultOptions(&allocator_));
  }

  [[noreturn]] void refuse(const std::string& why) const { ort::refuse(path_, why); }

  std::map<std::string, TensorType> inputs() const {
    return tensors(api_.SessionGetInputCount, api_.SessionGetInputName, api_.SessionGetInputTypeInfo);
  }
  std::map<std::string, TensorType> outputs() const {
    return tensors(api_.SessionGetOutputCount, api_.SessionGetOutputName, api_.SessionGetOutputTypeInfo);
  }

 private:
  void call(OrtStatus* result) const {
    check(api_, result, EQKV_BAD_PACKAGE, path_ + " cannot be read");
  }

  // A string that ONNX Runtime allocated, or null.
  std::string take(char* text) const {
    if (!text) return "";
    const std::string copy(text);
    call(api_.AllocatorFree(allocator_, text));
    return copy;
  }

  template <class Count, class Name, class Type>
  std::map<std::string, TensorType> tensors(Count count, Name name, Type type) const {
    std::map<std::string, TensorType> found;
    size_t n = 0;
    call(count(session_, &n));
    for (size_t i = 0; i < n; ++i) {
      char* text = nullptr;
      call(name(session_, i, allocator_, &text));
      const auto info = make_handle<OrtTypeInfo>(api_.ReleaseTypeInfo,
                                                 [&](auto** out) { call(type(session_, i, out)); });
      found.emplace(take(text), tensor_type(info.get()));
    }
    return found;
  }

  TensorType tensor_type(const OrtTypeInfo* info) const {
    TensorType type;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;  // owned by info
    call(api_.CastTypeInfoToTensorInfo(info, &tensor));
    if (!tensor) return type;
    call(api_.GetTensorElementType(tensor, &type.element));
    size_t rank = 0;
    call(api_.GetDimensionsCount(tensor, &rank));
    type.shape.resize(rank);
    call(api_.GetDimensions(tensor, type.shape.data(), rank));
    return type;
  }

  const Api& api_;
  OrtSession* const session_;
  const std::string path_;
  OrtAllocator* allocator_ = nullptr;  // ONNX Runtime's own, not to be released
};

// `want` is the type that a session binds: a dimension kAny varies from call to call and must be free in
// the graph; another may be free or equal.
void check_tensor(const GraphReader& graph, const std::map<std::string, TensorType>& tensors,
                  const std::string& name, const TensorType& want) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) graph.refuse("its graph has no input or output named " + name + ".");
  const TensorType& has = found->second;
  bool fits = has.element == want.element && has.shape.size() == want.shape.size();
  for (size_t i = 0; fits && i < want.shape.size(); ++i) {
    fits = has.shape[i] < 0 || has.shape[i] == want.shape[i];
  }
  if (!fits) graph.refuse("the type or shape of " + name + " in its graph does not fit its metadata.");
}

void check_format(const Metadata& metadata) {
  const int64_t format = metadata.number("format", 1'000'000);
  if (format < kFormat) metadata.refuse("was written by an older edge-qkv; export the model again.");
  if (format > kFormat) {
    metadata.refuse("was written by a newer edge-qkv (format " + std::to_string(format) +
                    ", this one reads " + std::to_string(kFormat) +
                    "); install that version or export the model again.");
  }
}

ModelInfo read_info(const Metadata& metadata) {
  constexpr const char* kTypes[] = {"fp32", "fp16", "int8"};  // CacheType
  constexpr const char* kPositions[] = {"none", "learned", "rotary-conjugate", "rotary-on-read"};
  ModelInfo info;
  info.engine = "onnxruntime";
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

ModelDescription describe_onnx(const std::string& path) {
  const OnnxFile file = read_onnx_file(path);
  const Metadata metadata(file, path);
  check_format(metadata);
  const ModelInfo info = read_info(metadata);
  return {info, read_plan_model(metadata, info, file.bytes)};
}

GraphNames graph_names(const ModelInfo& info) {
  GraphNames names{{"input_ids", "past", "logit_rows"}, {"logits"}};
  std::vector<std::string> kinds =
      info.cache.caches == 1 ? std::vector<std::string>{"kv"} : std::vector<std::string>{"key", "value"};
  if (info.cache.holds_scales(info.cache.caches)) {
    for (int64_t i = 0; i < info.cache.caches; ++i) {
      kinds.push_back(kinds[static_cast<size_t>(i)] + "_scale");
    }
  }
  for (int64_t layer = 0; layer < info.cache.layers; ++layer) {
    const std::string suffix = "." + std::to_string(layer);
    for (const std::string& kind : kinds) {
      names.inputs.push_back(kind + suffix);
      names.outputs.push_back(kind + "_out" + suffix);
    }
  }
  return names;
}

void check_graph(const Library& library, OrtSession* session, const ModelInfo& info,
                 const std::string& path) {
  const GraphReader graph(library, session, path);
  const GraphNames names = graph_names(info);
  const auto inputs = graph.inputs(), outputs = graph.outputs();
  if (inputs.size() != names.inputs.size()) {
    graph.refuse("its graph has " + std::to_string(inputs.size()) + " inputs instead of " +
                 std::to_string(names.inputs.size()) + ".");
  }
  const CacheLayout& layout = info.cache;
  const TensorType rows{element_type(layout.type), {1, layout.kv_heads, kAny, layout.head_dim}};
  const TensorType scales{kFloat16, {1, layout.kv_heads, kAny}};
  check_tensor(graph, inputs, "input_ids", {kInt64, {1, kAny}});
  check_tensor(graph, inputs, "past", {kInt64, {}});
  check_tensor(graph, inputs, "logit_rows", {kInt64, {kAny}});
  check_tensor(graph, outputs, "logits", {kFloat, {1, kAny, info.vocab_size}});
  for (int64_t i = 0; i < layout.tensors(); ++i) {
    const TensorType& cache = layout.holds_scales(i) ? scales : rows;
    const size_t at = static_cast<size_t>(i);
    check_tensor(graph, inputs, names.inputs[kPlainInputs + at], cache);
    check_tensor(graph, outputs, names.outputs[kPlainOutputs + at], cache);
  }
}

}  // namespace edge_qkv::ort
