#include "costs.h"

#include <algorithm>

namespace edge_qkv::ort {
namespace {

// Measured with tests/memory_probe.py: ONNX Runtime 1.32.0, Linux x86-64
// with AVX-512, 2 threads, int4 weights; the bundled model (8 layers,
// width 256) and 1.2B Q-MQA (22 layers, width 2048), packed and not.
constexpr uint64_t kKB = 1'000, kMB = 1'000'000;
// Pages of libonnxruntime and of what it brings along that are mapped: 20 to 22 MB with either model
// where the kernel's cache holds what was used before, 27 MB where it holds all of a file just written.
constexpr uint64_t kCode = 23 * kMB;
// Right after loading, without the weights: 10.1 MB with 8 layers, 11.8 MB
// with 22; its relocated data, nodes, tables of kernels. A thread has a
// stack and buffers of its own (estimated from one thread more or less).
constexpr uint64_t kStructures = 8'700 * kKB, kStructuresPerLayer = 120 * kKB,
                   kStructuresPerThread = 200 * kKB;
// Results alive at once in a chunk, in float32 values a token: three of the model's width and, in the
// MLP, one and a half widths of each of its matrices (a rounded copy, and what the allocator keeps), or
// in the attention, where that is more, 2.7 times the width of all heads (query, output and copies).
// Fits 15.7 MB at 1.2B and 2.0 MB of the bundled model at 128 tokens, and 11.4 MB at 128 and 91 MB at
// 1,024 tokens of a model of width 256 with 32 heads of 256.
constexpr uint64_t kWidths = 3;
constexpr int64_t kHalfMlpWidths = 3, kTenthsOfHeads = 27;
// Measurements of one model differ by up to 4 MB, and by 1 % from the sums here.
constexpr uint64_t kMargin = 5 * kMB, kMarginShare = 50;

// A block of a quantised matrix is codes and a float32 scale (MatMulNBits); a head has 8 bits.
constexpr int kScaleBytes = 4, kHeadBits = 8, kInt4Bits = 4, kDefaultBlock = 128;

bool in_blocks(const Description& m) { return m.weight_bits < 16; }

uint64_t blocked(uint64_t rows, uint64_t columns, int bits, int block_size) {
  const uint64_t size = static_cast<uint64_t>(block_size), blocks = (columns + size - 1) / size;
  return rows * blocks * (size * static_cast<uint64_t>(bits) / 8 + kScaleBytes);
}

uint64_t head_bytes(const Description& m) {
  return blocked(static_cast<uint64_t>(m.vocab_size), static_cast<uint64_t>(m.width), kHeadBits,
                 m.block_size);
}

// The scales alone. They stay mapped beside the repacked matrices, which hold them too.
uint64_t scale_bytes(const Description& m) {
  if (!in_blocks(m)) return 0;
  const uint64_t size = static_cast<uint64_t>(m.block_size), bits = static_cast<uint64_t>(m.weight_bits);
  const uint64_t head = std::min(head_bytes(m), m.matrix_bytes), layers = m.matrix_bytes - head;
  return (layers / (size * bits / 8 + kScaleBytes) + head / (size + kScaleBytes)) * kScaleBytes;
}

// The matrices as the kernels read them. Float ones keep their size;
// quantised ones get a sum beside each scale (MLAS, accuracy level 4).
// Read off the sizes in a packed file: exact but for 126 bytes a matrix.
uint64_t repacked_bytes(const Description& m) { return m.matrix_bytes + scale_bytes(m); }

// While it loads, ONNX Runtime repacks also what is packed, to compare the two, one matrix after the
// other. The largest is a matrix of the MLP or a part of the head (8,192 rows, see
// export/onnx_weights.py), and is there one and a half times: 27.8 MB were measured where it has 17.8.
uint64_t loading_bytes(const Description& m) {
  constexpr uint64_t kHeadRows = 8192;
  const uint64_t width = static_cast<uint64_t>(m.width), rows = static_cast<uint64_t>(m.vocab_size);
  uint64_t mlp = 0;
  for (const LayerKind& kind : m.kinds) mlp = std::max(mlp, static_cast<uint64_t>(kind.mlp_width));
  if (!in_blocks(m)) return 0;
  const uint64_t head = blocked(std::min(rows, kHeadRows), width, kHeadBits, m.block_size);
  return std::max(head, blocked(mlp, width, m.weight_bits, m.block_size)) * 3 / 2;
}

// Results of a token in a layer of this kind, in values beside those of the model's width.
uint64_t values_in_layer(const LayerKind& kind) {
  const int64_t in_mlp = kind.mlp_matrices * kind.mlp_width * kHalfMlpWidths / 2;
  int64_t in_attention = kind.heads * std::max(kind.head_dim, kind.value_dim) * kTenthsOfHeads / 10;
  if (kind.rows != Rows::kOther) in_attention += kind.kv_heads * kind.head_dim;
  if (kind.rows == Rows::kSeparate) in_attention += kind.kv_heads * kind.value_dim;
  return static_cast<uint64_t>(std::max(in_mlp, in_attention));
}

EngineCosts costs(const Description& m, const PlanOptions& options) {
  const uint64_t repacked = repacked_bytes(m), tokens = static_cast<uint64_t>(options.prefill_chunk);
  uint64_t in_layer = 0;
  for (const LayerKind& kind : m.kinds) in_layer = std::max(in_layer, values_in_layer(kind));
  const uint64_t values = kWidths * static_cast<uint64_t>(m.width) + in_layer;
  EngineCosts costs;
  costs.weights_file = m.table_bytes + scale_bytes(m) + (options.packed ? repacked : 0);
  costs.weights_anonymous = options.packed ? 0 : repacked;
  costs.workspace = tokens * values * sizeof(float);
  costs.loading = loading_bytes(m);
  costs.code = kCode;
  costs.structures = kStructures + kStructuresPerLayer * static_cast<uint64_t>(m.layers()) +
                     kStructuresPerThread * static_cast<uint64_t>(options.threads);
  costs.margin = kMargin;
  costs.margin_share = kMarginShare;
  return costs;
}

// As `edge-qkv export --weights int4` would store it.
Description in_int4(const Description& m) {
  Description changed = m;
  changed.weight_bits = kInt4Bits;
  if (!in_blocks(m)) changed.block_size = kDefaultBlock;
  const uint64_t size = static_cast<uint64_t>(changed.block_size);
  // Of a block without its scale.
  const uint64_t plain = size * static_cast<uint64_t>(m.weight_bits) / 8;
  const uint64_t from = in_blocks(m) ? plain + kScaleBytes : plain;
  const uint64_t head =
      in_blocks(m) ? head_bytes(m) : static_cast<uint64_t>(m.weight_bits / 8 * m.vocab_size * m.width);
  const uint64_t layers = m.matrix_bytes - std::min(head, m.matrix_bytes);
  changed.matrix_bytes = head_bytes(changed) + layers / from * (size * kInt4Bits / 8 + kScaleBytes);
  if (!in_blocks(m)) changed.table_bytes = m.table_bytes / plain * (size + kScaleBytes);
  return changed;
}

}  // namespace

const PlanEngine kPlanEngine = {costs, in_int4};

uint64_t packed_file_bytes(const Description& model) {
  return model.table_bytes + model.matrix_bytes + repacked_bytes(model);
}

}  // namespace edge_qkv::ort
