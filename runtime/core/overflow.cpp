#include "overflow.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention/cpu.h"
#include "error.h"

namespace edge_qkv {
namespace {

// Turns pair (i, i + half) of a row by `distance` positions.
class Rotation {
 public:
  Rotation(const ModelInfo& model, int64_t distance) : half_(static_cast<size_t>(model.rotary_dim / 2)) {
    for (size_t i = 0; i < half_; ++i) {
      const double frequency =
          std::pow(model.rotary_base, -static_cast<double>(i) / static_cast<double>(half_));
      cos_.push_back(static_cast<float>(std::cos(static_cast<double>(distance) * frequency)));
      sin_.push_back(static_cast<float>(std::sin(static_cast<double>(distance) * frequency)));
    }
  }

  void apply(float* row) const {  // [head_dim]
    for (size_t i = 0; i < half_; ++i) {
      const float a = row[i], b = row[half_ + i];
      row[i] = a * cos_[i] - b * sin_[i];
      row[half_ + i] = b * cos_[i] + a * sin_[i];
    }
  }

 private:
  const size_t half_;             // R/2
  std::vector<float> cos_, sin_;  // [R/2]
};

}  // namespace

Overflow::Overflow(const OverflowOptions& options, const ModelInfo& model, int64_t context)
    : options_(options), context_(context) {
  const auto refuse = [](const std::string& sentence) { throw Error(EQKV_INVALID_ARGUMENT, sentence); };
  const bool window = options.policy == EQKV_OVERFLOW_WINDOW,
             shift = options.policy == EQKV_OVERFLOW_SHIFT;
  if (options.sinks < 0 || options.window < 0 || options.block < 0) {
    refuse("sinks, window and block must not be negative.");
  }
  if ((!window && (options.sinks || options.window)) || (!shift && options.block)) {
    refuse("sinks and window belong to the overflow policy window, block to shift.");
  }
  if (!drops()) return;
  if (model.positions == Positions::kLearned) {
    refuse(
        "The model has learned positions, which its cached rows cannot leave: only the overflow policy "
        "error is possible; rewind the session and evaluate the tokens to keep again.");
  }
  if (window && options.window == 0) options_.window = std::max<int64_t>(1, context / 2 - options.sinks);
  if (shift && options.block == 0) options_.block = std::max<int64_t>(1, context / 4);
  if (window && options_.sinks >= context - options_.window) {
    refuse("The overflow policy keeps " + std::to_string(options_.sinks) + " + " +
           std::to_string(options_.window) + " tokens, which must be fewer than the context of " +
           std::to_string(context) + "; take a smaller window or fewer sinks.");
  }
  if (shift && options_.block > context) {
    refuse("The block to drop, " + std::to_string(options_.block) +
           " tokens, must not be more than the context of " + std::to_string(context) + ".");
  }
}

int64_t Overflow::most_tokens() const {
  return options_.policy == EQKV_OVERFLOW_WINDOW ? context_ - options_.sinks - options_.window
                                                 : context_;
}

Overflow::Range Overflow::rows_to_drop(int64_t length, int64_t more) const {
  const int64_t missing = length + more - context_;
  if (missing <= 0) return {0, 0};
  if (options_.policy == EQKV_OVERFLOW_WINDOW) return {options_.sinks, length - options_.window};
  const int64_t blocks = (missing + options_.block - 1) / options_.block;
  return {0, std::min(length, blocks * options_.block)};
}

void drop_rows(const CacheView& view, const ModelInfo& model, int64_t first, int64_t last,
               int64_t length) {
  const CacheLayout& layout = view.layout;
  const Kernel& kernel = active_kernel();
  const Rotation rotation(model, first - last);
  std::vector<float> row(static_cast<size_t>(layout.head_dim + kernel.lanes));  // whole vectors
  for (int64_t tensor = 0; tensor < layout.tensors(); ++tensor) {
    const int64_t in_layer = tensor % layout.tensors_per_layer();
    // The first tensor of a layer holds the keys, or keys and values at once; its scales go with it.
    const bool rotated = model.positions == Positions::kRotaryConjugate && in_layer == 0;
    const bool done = model.positions == Positions::kRotaryConjugate && in_layer == layout.caches;
    if (done) continue;
    for (int64_t head = 0; head < layout.kv_heads; ++head) {
      if (!rotated) {
        std::memmove(view.row(tensor, head, first), view.row(tensor, head, last),
                     layout.row_bytes(tensor) * static_cast<size_t>(length - last));
        continue;
      }
      const auto scale = [&](int64_t at) -> uint16_t* {
        if (facts(layout.type).scale_bytes == 0) return nullptr;
        return reinterpret_cast<uint16_t*>(view.row(tensor + layout.caches, head, at));
      };
      for (int64_t from = last, to = first; from < length; ++from, ++to) {
        kernel.read_row(layout.type, view.row(tensor, head, from), scale(from), row.data(),
                        layout.head_dim);
        rotation.apply(row.data());
        kernel.write_row(layout.type, row.data(), view.row(tensor, head, to), scale(to),
                         layout.head_dim);
      }
    }
  }
}

}  // namespace edge_qkv
