#include "costs.h"

#include <algorithm>

namespace edge_qkv::ort {
namespace {

constexpr uint64_t kMB = 1'000'000;
constexpr uint64_t kCode = 34 * kMB;
constexpr uint64_t kStructures = 10 * kMB;
constexpr uint64_t kStructuresPerLayer = 200'000;
constexpr uint64_t kStructuresPerThread = 300'000;
constexpr uint64_t kMargin = 8 * kMB;

// A block of a quantised matrix is codes and a float32 scale (MatMulNBits); a head has 8 bits.
constexpr int kScaleBytes = 4, kHeadBits = 8, kInt4Bits = 4, kDefaultBlock = 128;

uint64_t blocked(uint64_t rows, uint64_t columns, int bits, int block_size) {
  const uint64_t size = static_cast<uint64_t>(block_size), blocks = (columns + size - 1) / size;
  return rows * blocks * (size * static_cast<uint64_t>(bits) / 8 + kScaleBytes);
}

uint64_t head_bytes(const PlanModel& m) {
  return blocked(static_cast<uint64_t>(m.vocab_size), static_cast<uint64_t>(m.width), kHeadBits,
                 m.block_size);
}

// The matrices as the kernels read them. Float ones keep their size; quantised ones get a sum beside
// each scale (MLAS, accuracy level 4).
uint64_t repacked_bytes(const PlanModel& m) {
  if (m.weight_bits == 32) return m.matrix_bytes;
  const uint64_t size = static_cast<uint64_t>(m.block_size), bits = static_cast<uint64_t>(m.weight_bits);
  const uint64_t head = std::min(head_bytes(m), m.matrix_bytes), layers = m.matrix_bytes - head;
  const uint64_t blocks = layers / (size * bits / 8 + kScaleBytes) + head / (size + kScaleBytes);
  return m.matrix_bytes + blocks * kScaleBytes;
}

EngineCosts costs(const PlanModel& m, const PlanOptions& options) {
  const uint64_t repacked = repacked_bytes(m), tokens = static_cast<uint64_t>(options.prefill_chunk);
  const uint64_t width = static_cast<uint64_t>(m.width), mlp = static_cast<uint64_t>(m.mlp_width);
  EngineCosts costs;
  costs.weights_file = m.table_bytes + (options.packed ? repacked : 0);
  costs.weights_anonymous = options.packed ? 0 : repacked;
  const uint64_t values = 3 * width + static_cast<uint64_t>(m.mlp_matrices - 1) * mlp;
  costs.workspace = tokens * (values * sizeof(float) + mlp);
  costs.code = kCode;
  costs.structures = kStructures + kStructuresPerLayer * static_cast<uint64_t>(m.cache.layers) +
                     kStructuresPerThread * static_cast<uint64_t>(options.threads);
  costs.margin = kMargin;
  return costs;
}

// As `edge-qkv export --weights int4` would store it.
PlanModel in_int4(const PlanModel& m) {
  PlanModel changed = m;
  changed.weight_bits = kInt4Bits;
  changed.block_size = m.weight_bits == 32 ? kDefaultBlock : m.block_size;
  const uint64_t size = static_cast<uint64_t>(changed.block_size);
  const uint64_t from = m.weight_bits == 32
                            ? sizeof(float) * size
                            : size * static_cast<uint64_t>(m.weight_bits) / 8 + kScaleBytes;
  const uint64_t head = m.weight_bits == 32
                            ? sizeof(float) * static_cast<uint64_t>(m.vocab_size * m.width)
                            : head_bytes(m);
  const uint64_t layers = m.matrix_bytes - std::min(head, m.matrix_bytes);
  changed.matrix_bytes = head_bytes(changed) + layers / from * (size * kInt4Bits / 8 + kScaleBytes);
  if (m.weight_bits == 32) {
    changed.table_bytes = m.table_bytes / (sizeof(float) * size) * (size + kScaleBytes);
  }
  return changed;
}

}  // namespace

const PlanEngine kPlanEngine = {costs, in_int4};

uint64_t packed_file_bytes(const PlanModel& model) {
  return model.table_bytes + model.matrix_bytes + repacked_bytes(model);
}

}  // namespace edge_qkv::ort
