#include "overflow.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu.h"
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
  const size_t half_;                // R/2
  std::vector<float> cos_, sin_;     // [R/2]
};

}  // namespace

void check_rows_can_move(const ModelInfo& model) {
  if (model.positions != Positions::kLearned) return;
  throw Error(EQKV_INVALID_ARGUMENT,
              "This model has learned positions, which its cached rows cannot leave: a full context can "
              "only be an error; rewind the session and evaluate the tokens to keep again.");
}

void drop_rows(const CacheView& view, const ModelInfo& model, int64_t first, int64_t last,
               int64_t length) {
  const CacheLayout& layout = view.layout;
  const Kernel& kernel = active_kernel();
  const Rotation rotation(model, first - last);
  const size_t values = static_cast<size_t>(layout.head_dim);
  std::vector<float> row(values);
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
        kernel.read_row(layout.type, view.row(tensor, head, from), scale(from), row.data(), values);
        rotation.apply(row.data());
        kernel.write_row(layout.type, row.data(), view.row(tensor, head, to), scale(to), values);
      }
    }
  }
}

}  // namespace edge_qkv
