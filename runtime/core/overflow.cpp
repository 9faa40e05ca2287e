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

// Turns pair (i, i + half) of the rotated values of a row by `distance` positions.
class Rotation {
 public:
  Rotation(const LayerKind& kind, int64_t distance)
      : offset_(static_cast<size_t>(kind.rotary_offset)), half_(kind.frequencies.size()) {
    for (const double frequency : kind.frequencies) {
      cos_.push_back(static_cast<float>(std::cos(static_cast<double>(distance) * frequency)));
      sin_.push_back(static_cast<float>(std::sin(static_cast<double>(distance) * frequency)));
    }
  }

  void apply(float* row) const {  // [D]
    float* const rotated = row + offset_;
    for (size_t i = 0; i < half_; ++i) {
      const float a = rotated[i], b = rotated[half_ + i];
      rotated[i] = a * cos_[i] - b * sin_[i];
      rotated[half_ + i] = b * cos_[i] + a * sin_[i];
    }
  }

 private:
  const size_t offset_, half_;    // O, R/2
  std::vector<float> cos_, sin_;  // [R/2]
};

// Whether the rows of a tensor, or those that its scales belong to, hold rotated keys.
bool holds_rotated(const CacheTensor& tensor, const Description& model) {
  return model.layer(static_cast<size_t>(tensor.layer)).positions == Positions::kRotaryConjugate &&
         tensor.part != Part::kValue;
}

// The tensor of the scales of `tensor`.
size_t scales_of(const CacheLayout& layout, size_t tensor) {
  const CacheTensor& rows = layout.tensors[tensor];
  const auto found = std::find_if(
      layout.tensors.begin(), layout.tensors.end(),
      [&](const CacheTensor& t) { return t.scales && t.layer == rows.layer && t.part == rows.part; });
  return static_cast<size_t>(found - layout.tensors.begin());
}

// Moves rows of keys by `distance` up, their scales and their rotation along with them. `row`: room for
// one, in whole vectors.
void move_rotated(const CacheView& view, size_t tensor, const Rotation& rotation, RowSpan rows,
                  int64_t distance, float* row) {
  const CacheTensor& shape = view.layout.tensors[tensor];
  const CacheType type = view.layout.type;
  const bool scaled = cache_type_info(type).scale_bytes > 0;
  const size_t scales = scaled ? scales_of(view.layout, tensor) : 0;
  const Kernel& kernel = active_kernel();
  for (int64_t head = 0; head < shape.kv_heads; ++head) {
    const auto scale = [&](int64_t at) {
      return scaled ? reinterpret_cast<uint16_t*>(view.row({scales, head}, at)) : nullptr;
    };
    for (int64_t from = rows.begin, to = from - distance; from < rows.end; ++from, ++to) {
      kernel.read_row(type, view.row({tensor, head}, from), scale(from), row, shape.dim);
      rotation.apply(row);
      kernel.write_row(type, row, view.row({tensor, head}, to), scale(to), shape.dim);
    }
  }
}

// The longest window of a layer that does not always see the first `sinks` tokens; 0 where all layers
// have the same window, or none has one.
int64_t longest_window(const CacheLayout& layout, int64_t sinks) {
  const auto& all = layout.tensors;
  const bool alike = std::all_of(all.begin(), all.end(), [&](const CacheTensor& tensor) {
    return tensor.window == all.front().window;
  });
  int64_t longest = 0;
  for (const CacheTensor& tensor : all) {
    if (!alike && tensor.sinks < sinks) longest = std::max(longest, tensor.window);
  }
  return longest;
}

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
  if (model.description.learned_positions) {
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
  const int64_t local = longest_window(model.layout, options_.sinks);
  if (window && options_.window < local) {
    refuse(
        "The overflow policy keeps the first " + std::to_string(options_.sinks) + " and the last " +
        std::to_string(options_.window) + " tokens, but the model has layers that see only the last " +
        std::to_string(local) +
        ": after a drop they would see the first tokens as if these were the ones just before; take a "
        "window of at least " +
        std::to_string(local) + ", or no sinks.");
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

RowSpan Overflow::rows_to_drop(int64_t length, int64_t more) const {
  const int64_t missing = length + more - context_;
  if (missing <= 0) return {0, 0};
  if (options_.policy == EQKV_OVERFLOW_WINDOW) return {options_.sinks, length - options_.window};
  const int64_t blocks = (missing + options_.block - 1) / options_.block;
  return {0, std::min(length, blocks * options_.block)};
}

void drop_rows(CacheMemory& memory, const Description& model, RowSpan dropped, int64_t length) {
  const CacheView& view = memory.view();
  const auto& tensors = view.layout.tensors;
  const int64_t distance = dropped.end - dropped.begin;
  // All that may run out of memory comes first.
  std::vector<Rotation> rotations;  // of each kind
  for (const LayerKind& kind : model.kinds) rotations.emplace_back(kind, -distance);
  std::vector<std::vector<RowSpan>> moved;  // of each tensor
  int64_t longest = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    moved.push_back(memory.live(i, dropped.end, length));
    longest = std::max(longest, tensors[i].dim);
  }
  std::vector<float> row(static_cast<size_t>(longest + active_kernel().lanes));
  memory.changed_from(dropped.begin);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CacheTensor& tensor = tensors[i];
    const bool rotated = holds_rotated(tensor, model);
    if (rotated && tensor.scales) continue;  // they go with their rows
    for (const RowSpan& rows : moved[i]) {
      if (rotated) {
        move_rotated(view, i, rotations[model.pattern[static_cast<size_t>(tensor.layer)]], rows,
                     distance, row.data());
        continue;
      }
      for (int64_t head = 0; head < tensor.kv_heads; ++head) {
        std::memmove(view.row({i, head}, rows.begin - distance), view.row({i, head}, rows.begin),
                     view.layout.row_bytes(tensor) * static_cast<size_t>(rows.end - rows.begin));
      }
    }
  }
  memory.drop(dropped.begin, dropped.end, length);
}

}  // namespace edge_qkv
