#include "model_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>

#include "core/error.h"

namespace edge_qkv::ort {
namespace {

constexpr int64_t kFormat = 1;
constexpr int64_t kAny = -1;  // a dimension that is not fixed in the graph

struct TensorType {
  int element = kUndefined;
  std::vector<int64_t> shape;
};

class GraphReader {
 public:
  GraphReader(const Library& library, OrtSession* session, const std::string& path)
      : api_(library.api()), session_(session), path_(path) {
    call(api_.GetAllocatorWithDefaultOptions(&allocator_));
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(EQKV_BAD_PACKAGE, path_ + ": " + why);
  }

  // The metadata `key`, an integer in [1, most].
  int64_t number(const std::string& key, int64_t most) const {
    const std::string text = metadata(key);
    if (text.empty()) refuse("is not an edge-qkv model: it has no metadata edge_qkv." + key + ".");
    char* end = nullptr;
    errno = 0;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (errno != 0 || *end != '\0' || value < 1 || value > most) {
      refuse("its metadata edge_qkv." + key + " is \"" + printable(text) +
             "\", not a number from 1 to " + std::to_string(most) + ".");
    }
    return value;
  }

  std::string metadata(const std::string& key) const {
    const auto all = make_handle<OrtModelMetadata>(api_.ReleaseModelMetadata, [&](auto** out) {
      call(api_.SessionGetModelMetadata(session_, out));
    });
    char* value = nullptr;
    call(api_.ModelMetadataLookupCustomMetadataMap(all.get(), allocator_, ("edge_qkv." + key).c_str(),
                                                   &value));
    return take(value);
  }

  std::map<std::string, TensorType> inputs() const {
    return tensors(api_.SessionGetInputCount, api_.SessionGetInputName, api_.SessionGetInputTypeInfo);
  }
  std::map<std::string, TensorType> outputs() const {
    return tensors(api_.SessionGetOutputCount, api_.SessionGetOutputName, api_.SessionGetOutputTypeInfo);
  }

  // Text of a file in a message: short, and no control characters.
  static std::string printable(const std::string& text) {
    std::string out = text.substr(0, 40);
    std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c >= 0x7f; }, '?');
    return out;
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

void check_format(const GraphReader& graph) {
  const int64_t format = graph.number("format", 1'000'000);
  if (format > kFormat) {
    graph.refuse("was written by a newer edge-qkv (format " + std::to_string(format) +
                 ", this one reads " + std::to_string(kFormat) +
                 "); install that version or export the model again.");
  }
}

ModelInfo read_metadata(const GraphReader& graph) {
  check_format(graph);
  ModelInfo info;
  info.engine = "onnxruntime";
  // Bounds far above any model that exists, and far below what overflows.
  info.vocab_size = graph.number("vocab_size", 1 << 24);
  info.layers = graph.number("layers", 1 << 12);
  info.kv_heads = graph.number("kv_heads", 1 << 12);
  info.head_dim = graph.number("head_dim", 1 << 16);
  info.caches = graph.number("caches", 2);
  info.max_positions = graph.number("max_positions", int64_t{1} << 31);
  const std::string type = graph.metadata("cache_type");
  if (type != "fp32" && type != "fp16") {
    graph.refuse("its metadata edge_qkv.cache_type is \"" + GraphReader::printable(type) +
                 "\", not fp32 or fp16.");
  }
  info.cache_type = type == "fp32" ? CacheType::kFloat32 : CacheType::kFloat16;
  return info;
}

}  // namespace

GraphNames graph_names(const ModelInfo& info) {
  GraphNames names{{"input_ids", "past", "logit_rows"}, {"logits"}};
  for (int64_t layer = 0; layer < info.layers; ++layer) {
    const std::string suffix = "." + std::to_string(layer);
    for (const char* cache :
         info.caches == 1 ? std::vector<const char*>{"kv"} : std::vector<const char*>{"key", "value"}) {
      names.inputs.push_back(cache + suffix);
      names.outputs.push_back(cache + ("_out" + suffix));
    }
  }
  return names;
}

ModelInfo read_model_info(const Library& library, OrtSession* session, const std::string& path) {
  const GraphReader graph(library, session, path);
  const ModelInfo info = read_metadata(graph);
  const GraphNames names = graph_names(info);
  const auto inputs = graph.inputs(), outputs = graph.outputs();
  if (inputs.size() != names.inputs.size()) {
    graph.refuse("its graph has " + std::to_string(inputs.size()) + " inputs instead of " +
                 std::to_string(names.inputs.size()) + ".");
  }
  const int cache_element = info.cache_type == CacheType::kFloat32 ? kFloat : kFloat16;
  const TensorType cache{cache_element, {1, info.kv_heads, kAny, info.head_dim}};
  check_tensor(graph, inputs, "input_ids", {kInt64, {1, kAny}});
  check_tensor(graph, inputs, "past", {kInt64, {}});
  check_tensor(graph, inputs, "logit_rows", {kInt64, {kAny}});
  check_tensor(graph, outputs, "logits", {kFloat, {1, kAny, info.vocab_size}});
  for (size_t i = kPlainInputs; i < names.inputs.size(); ++i) {
    check_tensor(graph, inputs, names.inputs[i], cache);
    check_tensor(graph, outputs, names.outputs[i - kPlainInputs + kPlainOutputs], cache);
  }
  return info;
}

}  // namespace edge_qkv::ort
