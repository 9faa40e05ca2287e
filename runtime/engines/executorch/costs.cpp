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
constexpr uint64_t kWidths = 5, kQuartersOfMlp = 1, kHalvesOfHeads = 5;
constexpr uint64_t kMargin = 5 * kMB, kMarginShare = 50;
// XNNPACK's packing puts a sum and a bias beside the scale of a row.
constexpr uint64_t kPackedBytesPerRow = 8, kPaddingShare = 16;

// Layers of 4 bits have a bf16 scale a group, what has 8 bits a float32 scale a row, and an embedding of
// 4 bits, where its width allows it, a float32 scale a group.
constexpr uint64_t kGroupScaleBytes = 2, kRowScaleBytes = 4, kTableGroup = 32, kTableScaleBytes = 4;
constexpr int kInt4Bits = 4, kDefaultBlock = 64;

// Of all matrices: the head's and, of a layer, query, keys (and values), output and those of the MLP.
uint64_t matrix_rows(const PlanModel& m) {
  const int64_t attention = (m.heads + m.cache.caches * m.cache.kv_heads) * m.cache.head_dim + m.width;
  const int64_t mlp = (m.mlp_matrices - 1) * m.mlp_width + m.width;
  return static_cast<uint64_t>(m.vocab_size + m.cache.layers * (attention + mlp));
}

// The matrices as the kernels read them.
uint64_t repacked_bytes(const PlanModel& m) {
  return m.matrix_bytes + (m.weight_bits == 32 ? 0 : kPackedBytesPerRow * matrix_rows(m));
}

EngineCosts costs(const PlanModel& m, const PlanOptions& options) {
  const uint64_t repacked = repacked_bytes(m), tokens = static_cast<uint64_t>(options.prefill_chunk);
  const uint64_t width = static_cast<uint64_t>(m.width), mlp = static_cast<uint64_t>(m.mlp_width);
  const uint64_t in_mlp = static_cast<uint64_t>(m.mlp_matrices - 1) * mlp + mlp * kQuartersOfMlp / 4;
  const uint64_t in_attention = static_cast<uint64_t>(m.heads * m.cache.head_dim) * kHalvesOfHeads / 2;
  const uint64_t values = kWidths * width + std::max(in_mlp, in_attention);
  EngineCosts costs;
  costs.weights_file = m.table_bytes + (options.packed ? repacked : 0);
  costs.weights_anonymous = options.packed ? 0 : repacked;
  costs.workspace = tokens * values * sizeof(float);
  costs.code = kCode;
  costs.structures = kStructures + kStructuresPerLayer * static_cast<uint64_t>(m.cache.layers) +
                     kStructuresPerThread * static_cast<uint64_t>(options.threads);
  costs.margin = kMargin;
  costs.margin_share = kMarginShare;
  return costs;
}

uint64_t head_bytes(const PlanModel& m) {
  const uint64_t rows = static_cast<uint64_t>(m.vocab_size), width = static_cast<uint64_t>(m.width);
  return m.weight_bits == 32 ? sizeof(float) * rows * width : rows * (width + kRowScaleBytes);
}

// As `edge-qkv export --target executorch --weights 8da4w` would store it.
PlanModel in_int4(const PlanModel& m) {
  PlanModel changed = m;
  changed.weight_bits = kInt4Bits;
  changed.block_size = kDefaultBlock;
  const uint64_t group = static_cast<uint64_t>(changed.block_size);
  const uint64_t layers = m.matrix_bytes - std::min(head_bytes(m), m.matrix_bytes);
  const uint64_t weights =
      layers / static_cast<uint64_t>(m.weight_bits / 8);  // scales of rows count too
  changed.matrix_bytes =
      head_bytes(changed) + weights / group * (group * kInt4Bits / 8 + kGroupScaleBytes);
  const uint64_t table = static_cast<uint64_t>(m.vocab_size * m.width);
  if (m.weight_bits == 32 && static_cast<uint64_t>(m.width) % kTableGroup == 0) {
    changed.table_bytes -= std::min(sizeof(float) * table, m.table_bytes);
    changed.table_bytes += table / kTableGroup * (kTableGroup * kInt4Bits / 8 + kTableScaleBytes);
  }
  return changed;
}

}  // namespace

const PlanEngine kPlanEngine = {costs, in_int4, true};

uint64_t packed_file_bytes(const PlanModel& model) {
  // Each matrix begins a page, after the padding of its rows. Where the disk fills up below a mapped
  // file, the process ends: more is asked for than is needed.
  const PlanModel& m = model;
  const int64_t matrices = m.cache.layers * (2 + m.cache.caches + m.mlp_matrices) + 1;
  const uint64_t repacked = repacked_bytes(m), page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return repacked + repacked / kPaddingShare + 2 * page * static_cast<uint64_t>(matrices);
}

}  // namespace edge_qkv::et
