// The attention operator as the files of every engine call it: the order of its tensors, and what must
// be true of them. They come from a file: nothing about them is believed unchecked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "attention/attention.h"

namespace edge_qkv {

enum OperatorInput {
  kQuery,            // [B, T, H*D]
  kKey,              // [B, T, G*D]; absent where an earlier layer has written the rows
  kCache,            // [B, G, C, D]
  kPast,             // []
  kCos,              // [P, R/2]
  kSin,              // [P, R/2]
  kValue,            // [B, T, G*V]
  kValueCache,       // [B, G, C, V]
  kCacheScale,       // [B, G, C]
  kValueCacheScale,  // [B, G, C]
  kKeyWeight,        // [D]
  kOperatorInputs
};

enum class Element { kOther, kFloat32, kFloat16, kInt8, kInt64 };

constexpr size_t kMostRank = 4;

// A tensor as an engine describes it, row-major and without gaps.
struct OperatorTensor {
  bool present = false;
  Element element = Element::kOther;
  size_t rank = 0;
  int64_t shape[kMostRank] = {};
  void* data = nullptr;
};

// Sets the rotary mode by its name in the file; false where there is no such mode.
bool read_rotary_mode(const std::string& name, Rotary* rotary);

// Fills in what the tensors say into `params`, which has the attributes already, all but `output`.
// Returns one sentence where they do not fit each other or the attributes, else an empty string: then
// the output is the caller's to set, and attention_error to ask.
std::string read_operator(const OperatorTensor (&inputs)[kOperatorInputs], AttentionParams* params);

// Width of the output, [B, T, H*V].
constexpr int64_t output_width(const AttentionParams& params) {
  return int64_t{params.num_heads} * params.value_dim;
}

}  // namespace edge_qkv
