#include "operator.h"

#include <climits>
#include <cstring>
#include <iterator>

namespace edge_qkv {
namespace {

// What each input must be, in the order of OperatorInput. kOther: the caches are of the type that the
// file has chosen.
struct InputType {
  const char* name;  // for messages
  size_t rank;
  Element element;
};
constexpr InputType kInputTypes[] = {
    {"query", 3, Element::kFloat32},       {"kv", 3, Element::kFloat32},
    {"cache", 4, Element::kOther},         {"past", 0, Element::kInt64},
    {"cos", 2, Element::kFloat32},         {"sin", 2, Element::kFloat32},
    {"value", 3, Element::kFloat32},       {"value_cache", 4, Element::kOther},
    {"cache_scale", 3, Element::kFloat16}, {"value_cache_scale", 3, Element::kFloat16},
    {"key_weight", 1, Element::kFloat32},
};
static_assert(std::size(kInputTypes) == kOperatorInputs);

bool cache_type_of(Element element, CacheType* type) {
  constexpr Element kTypes[] = {Element::kFloat32, Element::kFloat16, Element::kInt8};  // CacheType
  for (int i = 0; i < 3; ++i) {
    *type = static_cast<CacheType>(i);
    if (kTypes[i] == element) return true;
  }
  return false;
}

bool same_shape(const OperatorTensor& a, const OperatorTensor& b) {
  return a.rank == b.rank && std::memcmp(a.shape, b.shape, a.rank * sizeof a.shape[0]) == 0;
}

}  // namespace

bool read_rotary_mode(const std::string& name, Rotary* rotary) {
  constexpr const char* kNames[] = {"none", "conjugate", "on_read"};  // Rotary
  for (int i = 0; i < 3; ++i) {
    *rotary = static_cast<Rotary>(i);
    if (name == kNames[i]) return true;
  }
  return false;
}

std::string read_operator(const OperatorTensor (&inputs)[kOperatorInputs], AttentionParams* params) {
  for (size_t i = 0; i < kOperatorInputs; ++i) {
    const OperatorTensor& tensor = inputs[i];
    const InputType& type = kInputTypes[i];
    const std::string name = std::string("The attention's input ") + type.name;
    if (!tensor.present) continue;
    if (type.element != Element::kOther && tensor.element != type.element) {
      return name + " has the wrong element type.";
    }
    if (tensor.rank != type.rank) {
      return name + " has " + std::to_string(tensor.rank) + " dimensions instead of " +
             std::to_string(type.rank) + ".";
    }
  }
  const OperatorTensor &query = inputs[kQuery], &key = inputs[kKey], &cache = inputs[kCache],
                       &past = inputs[kPast], &cos = inputs[kCos], &sin = inputs[kSin],
                       &value = inputs[kValue], &value_cache = inputs[kValueCache],
                       &key_weight = inputs[kKeyWeight];
  AttentionParams& p = *params;
  if (!query.present || !cache.present || !past.present || !past.data) {
    return "The attention needs query, cache and past.";
  }
  if (!cache_type_of(cache.element, &p.cache_type)) return "The cache must be float, float16 or int8.";
  p.batch = query.shape[0];
  p.tokens = query.shape[1];
  p.past = *static_cast<const int64_t*>(past.data);
  p.capacity = cache.shape[2];
  if (cache.shape[3] > INT_MAX) return "The cache's head_dim is out of range.";
  p.head_dim = static_cast<int>(cache.shape[3]);

  const auto rows_of = [&](const OperatorTensor& t, int64_t heads, int64_t dim) {  // [B, T, heads*dim]
    return t.shape[0] == p.batch && t.shape[1] == p.tokens && t.shape[2] == heads * dim;
  };
  if (cache.shape[0] != p.batch || cache.shape[1] != p.kv_heads) {
    return "The cache's batch or kv heads do not fit the query and kv_heads.";
  }
  if (!rows_of(query, p.num_heads, p.head_dim)) {
    return "The query's width is not num_heads times head_dim.";
  }
  if (key.present && !rows_of(key, p.kv_heads, p.head_dim)) {
    return "The shape of kv does not fit the query and the cache.";
  }
  if (!key.present && value.present) return "A value without kv has no meaning.";
  if (key.present && value.present != value_cache.present) {
    return "A separate value needs a value cache, and only it.";
  }
  if (value.present && !rows_of(value, p.kv_heads, p.value_dim)) {
    return "The shape of value does not fit the query and value_dim.";
  }
  if (value_cache.present) {
    if (std::memcmp(value_cache.shape, cache.shape, 3 * sizeof cache.shape[0]) != 0 ||
        value_cache.shape[3] != p.value_dim || value_cache.element != cache.element) {
      return "The shape or type of the value cache does not fit the other cache and value_dim.";
    }
  }
  if (key_weight.present && key_weight.shape[0] != p.head_dim) {
    return "The key weight has not head_dim values.";
  }
  for (const OperatorInput scale : {kCacheScale, kValueCacheScale}) {
    if (inputs[scale].present &&
        std::memcmp(inputs[scale].shape, cache.shape, 3 * sizeof cache.shape[0]) != 0) {
      return "The shapes of a cache and its scales differ.";
    }
  }
  if (p.rotary != Rotary::kNone) {
    if (!cos.present || !sin.present || !same_shape(cos, sin) || cos.shape[1] != p.rotary_dim / 2) {
      return "Rotary positions need cos and sin of [positions, rotary_dim / 2].";
    }
    p.rotary_rows = cos.shape[0];
    p.cos = static_cast<const float*>(cos.data);
    p.sin = static_cast<const float*>(sin.data);
  }

  p.query = static_cast<const float*>(query.data);
  p.key = static_cast<const float*>(key.data);
  p.value = static_cast<const float*>(value.data);
  p.key_weight = static_cast<const float*>(key_weight.data);
  p.key_cache = cache.data;
  p.value_cache = value_cache.data;
  p.key_scales = static_cast<uint16_t*>(inputs[kCacheScale].data);
  p.value_scales = static_cast<uint16_t*>(inputs[kValueCacheScale].data);
  return "";
}

}  // namespace edge_qkv
