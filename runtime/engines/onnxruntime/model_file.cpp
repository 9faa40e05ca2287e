#include "model_file.h"

#include <map>

#include "core/error.h"
#include "onnx_file.h"

namespace edge_qkv::ort {
namespace {

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
  if (!fits)
    graph.refuse("the type or shape of " + name + " in its graph does not fit its description.");
}

}  // namespace

ModelInfo describe_onnx(const std::string& path) {
  return model_info(read_onnx_file(path), path, "onnxruntime");
}

GraphNames graph_names(const ModelInfo& info) {
  GraphNames names{{"input_ids", "past", "logit_rows"}, {"logits"}};
  for (const CacheTensor& tensor : info.layout.tensors) {
    const std::string part = part_name(tensor), layer = "." + std::to_string(tensor.layer);
    names.inputs.push_back(part + layer);
    names.outputs.push_back(part + "_out" + layer);
  }
  return names;
}

void check_graph(const Library& library, OrtSession* session, const ModelInfo& info) {
  const GraphReader graph(library, session, info.path);
  const GraphNames names = graph_names(info);
  const auto inputs = graph.inputs(), outputs = graph.outputs();
  if (inputs.size() != names.inputs.size()) {
    graph.refuse("its graph has " + std::to_string(inputs.size()) + " inputs instead of " +
                 std::to_string(names.inputs.size()) + ".");
  }
  check_tensor(graph, inputs, "input_ids", {kInt64, {1, kAny}});
  check_tensor(graph, inputs, "past", {kInt64, {}});
  check_tensor(graph, inputs, "logit_rows", {kInt64, {kAny}});
  check_tensor(graph, outputs, "logits", {kFloat, {1, kAny, info.description.vocab_size}});
  const CacheLayout& layout = info.layout;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const CacheTensor& tensor = layout.tensors[i];
    TensorType cache{element_type(layout.type), {1, tensor.kv_heads, kAny, tensor.dim}};
    if (tensor.scales) cache = {kFloat16, {1, tensor.kv_heads, kAny}};
    check_tensor(graph, inputs, names.inputs[kPlainInputs + i], cache);
    check_tensor(graph, outputs, names.outputs[kPlainOutputs + i], cache);
  }
}

}  // namespace edge_qkv::ort
