#include "costs.h"

#include <unistd.h>

#include <algorithm>

namespace edge_qkv::et {
namespace {

// Measured with tests/memory_probe.py: ExecuTorch 1.5.1, Linux x86-64, 2 threads, 8da4w weights; the
// bundled model (8 layers, width 256) and 1.2B Q-MQA (22 layers, width 2048), packed and not.
constexpr uint64_t kKB = 1'000, kMB = 1'000'000;
// Pages of its libraries that are mapped: 4.5 to 4.8 MB with either model.
constexpr uint64_t kCode = 4'800 * kKB;
// Right after loading, without the weights: 0.6 MB with 8 layers, 0.9 with 22; program and delegates. A
// thread has a stack and buffers of its own.
constexpr uint64_t kStructures = 500 * kKB, kStructuresPerLayer = 20 * kKB,
                   kStructuresPerThread = 50 * kKB;
// Results alive at once in a chunk, in float32 values a token: five of the model's width (four between
// the program's parts, the rest inside of one), and in the MLP those of all matrices but the last, and a
// copy in int8 of what that reads; or, where that is more, 2.5 times the width of all heads. Fits 85.7
// KB a token at 1.2B and 10.7 KB of the bundled model within 7 %.
constexpr uint64_t kWidths = 5;
constexpr int64_t kQuartersOfMlp = 1, kHalvesOfHeads = 5;
constexpr uint64_t kMargin = 5 * kMB, kMarginShare = 50;
// XNNPACK's packing puts a sum and a bias beside the scale of a row.
constexpr uint64_t kPackedBytesPerRow = 8, kPaddingShare = 16;

// Layers of 4 bits have a bf16 scale a group, what has 8 bits a float32 scale a row, and an embedding of
// 4 bits, where its width allows it, a float32 scale a group.
constexpr uint64_t kGroupScaleBytes = 2, kRowScaleBytes = 4, kTableGroup = 32, kTableScaleBytes = 4;
constexpr int kInt4Bits = 4, kDefaultBlock = 64;

bool quantised(const Description& m) { return m.weight_bits < 16; }

// Matrices of a layer of this kind that give rows to the cache, and the values they give to a token.
int64_t row_matrices(const LayerKind& kind) {
  return kind.rows == Rows::kOther ? 0 : kind.rows == Rows::kUnified ? 1 : 2;
}
int64_t row_values(const LayerKind& kind) {
  return (row_matrices(kind) > 0 ? kind.kv_heads * kind.head_dim : 0) +
         (row_matrices(kind) > 1 ? kind.kv_heads * kind.value_dim : 0);
}

// Of all matrices: the head's and, of a layer, query, keys (and values), output and those of the MLP.
uint64_t matrix_rows(const Description& m) {
  int64_t rows = m.vocab_size;
  for (size_t i = 0; i < m.pattern.size(); ++i) {
    const LayerKind& kind = m.layer(i);
    rows += kind.heads * kind.head_dim + row_values(kind) + m.width;
    rows += (kind.mlp_matrices - 1) * kind.mlp_width + m.width;
  }
  return static_cast<uint64_t>(rows);
}

// The matrices as the kernels read them.
uint64_t repacked_bytes(const Description& m) {
  return m.matrix_bytes + (quantised(m) ? kPackedBytesPerRow * matrix_rows(m) : 0);
}

// Results of a token in a layer of this kind, in values beside those of the model's width.
uint64_t values_in_layer(const LayerKind& kind) {
  const int64_t in_mlp = (kind.mlp_matrices - 1) * kind.mlp_width + kind.mlp_width * kQuartersOfMlp / 4;
  const int64_t in_attention = kind.heads * std::max(kind.head_dim, kind.value_dim) * kHalvesOfHeads / 2;
  return static_cast<uint64_t>(std::max(in_mlp, in_attention));
}

EngineCosts costs(const Description& m, const PlanOptions& options) {
  const uint64_t repacked = repacked_bytes(m), tokens = static_cast<uint64_t>(options.prefill_chunk);
  uint64_t in_layer = 0;
  for (const LayerKind& kind : m.kinds) in_layer = std::max(in_layer, values_in_layer(kind));
  const uint64_t values = kWidths * static_cast<uint64_t>(m.width) + in_layer;
  EngineCosts costs;
  costs.weights_file = m.table_bytes + (options.packed ? repacked : 0);
  costs.weights_anonymous = options.packed ? 0 : repacked;
  costs.workspace = tokens * values * sizeof(float);
  costs.code = kCode;
  costs.structures = kStructures + kStructuresPerLayer * static_cast<uint64_t>(m.layers()) +
                     kStructuresPerThread * static_cast<uint64_t>(options.threads);
  costs.margin = kMargin;
  costs.margin_share = kMarginShare;
  return costs;
}

uint64_t head_bytes(const Description& m) {
  const uint64_t rows = static_cast<uint64_t>(m.vocab_size), width = static_cast<uint64_t>(m.width);
  return quantised(m) ? rows * (width + kRowScaleBytes)
                      : rows * width * static_cast<uint64_t>(m.weight_bits / 8);
}

// As `edge-qkv export --target executorch --weights 8da4w` would store it.
Description in_int4(const Description& m) {
  Description changed = m;
  changed.weight_bits = kInt4Bits;
  changed.block_size = kDefaultBlock;
  const uint64_t group = static_cast<uint64_t>(changed.block_size);
  const uint64_t layers = m.matrix_bytes - std::min(head_bytes(m), m.matrix_bytes);
  // Scales of rows count too.
  const uint64_t weights = layers / static_cast<uint64_t>(m.weight_bits / 8);
  changed.matrix_bytes =
      head_bytes(changed) + weights / group * (group * kInt4Bits / 8 + kGroupScaleBytes);
  const uint64_t table = static_cast<uint64_t>(m.vocab_size * m.width);
  if (!quantised(m) && static_cast<uint64_t>(m.width) % kTableGroup == 0) {
    changed.table_bytes -= std::min(static_cast<uint64_t>(m.weight_bits / 8) * table, m.table_bytes);
    changed.table_bytes += table / kTableGroup * (kTableGroup * kInt4Bits / 8 + kTableScaleBytes);
  }
  return changed;
}

}  // namespace

const PlanEngine kPlanEngine = {costs, in_int4, true};

uint64_t packed_file_bytes(const Description& model) {
  // Each matrix begins a page, after the padding of its rows. Where the disk fills up below a mapped
  // file, the process ends: more is asked for than is needed.
  int64_t matrices = 1;
  for (size_t i = 0; i < model.pattern.size(); ++i) {
    matrices += 2 + row_matrices(model.layer(i)) + model.layer(i).mlp_matrices;
  }
  const uint64_t repacked = repacked_bytes(model), page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return repacked + repacked / kPaddingShare + 2 * page * static_cast<uint64_t>(matrices);
}

}  // namespace edge_qkv::et
