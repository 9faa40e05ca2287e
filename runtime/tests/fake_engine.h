// A tiny engine whose rows and logits can be worked out by hand.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "core/error.h"

namespace edge_qkv::test {

constexpr int64_t kVocab = 10, kMaxPositions = 1000;

// What a test sees of the engine, and how it makes it fail.
struct Probe {
  std::vector<size_t> chunks, logit_rows;
  std::atomic<bool> running{false};
  bool wait = false;  // until interrupted
  int fail_after = -1;
};

// Every byte of row i of slab s is (token i) + s + 1. The largest logit of a position is the token (sum
// of all tokens that the first tensor's window shows it) mod vocabulary, read back from the cache; the
// one behind it is a hash of every byte of the cache that it sees. A row that any position of a chunk
// sees and that is gone, that is all zeros, is an error.
class FakeState : public EngineState {
 public:
  FakeState(const CacheView& cache, Probe& probe)
      : probe_(probe), cache_(cache), slabs_(cache.layout.slabs()) {}

  void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
               float* logits) override {
    probe_.chunks.push_back(count);
    probe_.logit_rows.push_back(logit_rows);
    probe_.running = true;
    while (probe_.wait && !interrupted_) std::this_thread::yield();
    if (interrupted_) throw Error(EQKV_ENGINE_FAILED, "interrupted");
    if (probe_.fail_after-- == 0) throw Error(EQKV_ENGINE_FAILED, "broken");
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      for (size_t i = 0; i < count; ++i) {
        std::memset(cache_.row(slabs_[slab], past + static_cast<int64_t>(i)),
                    static_cast<int>(tokens[i] + static_cast<int>(slab) + 1), row_bytes(slab));
      }
    }
    check_rows(past, past + static_cast<int64_t>(count) - 1);
    std::memset(logits, 0, logit_rows * kVocab * sizeof *logits);
    for (size_t i = 0; i < logit_rows; ++i) {
      const int64_t position = past + static_cast<int64_t>(count - logit_rows + i);
      float* out = logits + i * kVocab;
      size_t sum = 0;
      for (int64_t row = 0; row <= position; ++row) {
        if (sees(0, position, row)) sum += static_cast<size_t>(cache_.row(slabs_[0], row)[0]) - 1;
      }
      out[sum % kVocab] = 1;
      out[(sum + 1) % kVocab] = -static_cast<float>(hash(position) % 1000);
    }
  }

  void interrupt() noexcept override { interrupted_ = true; }
  void resume() noexcept override { interrupted_ = false; }

 private:
  const CacheTensor& tensor(size_t slab) const { return cache_.layout.tensors[slabs_[slab].tensor]; }
  size_t row_bytes(size_t slab) const { return cache_.layout.row_bytes(tensor(slab)); }

  // As attention/attention.h defines it.
  bool sees(size_t slab, int64_t position, int64_t row) const {
    const CacheTensor& t = tensor(slab);
    return row <= position && (t.window == 0 || row < t.sinks || row > position - t.window);
  }

  void check_rows(int64_t first, int64_t last) const {  // positions
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      const size_t bytes = row_bytes(slab);
      for (int64_t row = 0; row <= last; ++row) {
        if (!sees(slab, std::max(first, row), row)) continue;
        const std::byte* at = cache_.row(slabs_[slab], row);
        if (at[0] == std::byte{0} && std::memcmp(at, at + 1, bytes - 1) == 0) {
          throw Error(EQKV_ENGINE_FAILED, "row " + std::to_string(row) + " is gone");
        }
      }
    }
  }

  uint64_t hash(int64_t position) const {
    uint64_t hash = 0xcbf29ce484222325u;  // as FNV-1a, but by words
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      const size_t bytes = row_bytes(slab);
      for (int64_t row = 0; row <= position; ++row) {
        if (!sees(slab, position, row)) continue;
        const std::byte* at = cache_.row(slabs_[slab], row);
        for (size_t i = 0; i < bytes; i += sizeof hash) {
          uint64_t word = 0;
          std::memcpy(&word, at + i, std::min(sizeof word, bytes - i));
          hash = (hash ^ word ^ hash >> 29) * 0x100000001b3u;
        }
      }
    }
    return hash;
  }

  Probe& probe_;
  const CacheView cache_;
  const std::vector<Slab> slabs_;
  std::atomic<bool> interrupted_{false};
};

struct FakeLayer {
  int64_t kv_heads = 1, dim = 1;
  int64_t value_dim = 0;  // of values of their own; 0: unified
  int64_t window = 0, sinks = 0;
};

inline CacheLayout layout_of(CacheType type, const std::vector<FakeLayer>& layers) {
  CacheLayout layout{type, {}};
  for (size_t i = 0; i < layers.size(); ++i) {
    const FakeLayer& layer = layers[i];
    for (const bool scales : {false, true}) {
      if (scales && cache_type_info(type).scale_bytes == 0) continue;
      const auto add = [&](Part part, int64_t dim) {
        layout.tensors.push_back(
            {static_cast<int64_t>(i), part, scales, layer.kv_heads, dim, layer.window, layer.sinks});
      };
      add(layer.value_dim > 0 ? Part::kKey : Part::kRow, layer.dim);
      if (layer.value_dim > 0) add(Part::kValue, layer.value_dim);
    }
  }
  return layout;
}

// All layers alike; caches: 1 unified, 2 with keys and values.
inline CacheLayout uniform_layout(CacheType type, size_t layers, int64_t caches, int64_t kv_heads,
                                  int64_t dim) {
  return layout_of(type, std::vector<FakeLayer>(layers, {kv_heads, dim, caches == 2 ? dim : 0, 0, 0}));
}

// One of each kind, none with rows that fill pages evenly except the first.
inline const CacheLayout kLayouts[] = {
    uniform_layout(CacheType::kFloat32, 1, 1, 1, 1),  uniform_layout(CacheType::kFloat16, 3, 1, 1, 62),
    uniform_layout(CacheType::kFloat32, 2, 2, 3, 31), uniform_layout(CacheType::kInt8, 2, 1, 1, 62),
    uniform_layout(CacheType::kInt8, 2, 2, 2, 21),
};

// Layers that differ: windows with and without sinks, rows of which a page holds 1 to 60, beside layers
// that see everything; and a model of one window.
inline const CacheLayout kMixed[] = {
    layout_of(CacheType::kFloat32,
              {{1, 300, 0, 20, 0}, {1, 1, 0, 0, 0}, {1, 300, 0, 20, 0}, {2, 17, 0, 50, 3}}),
    layout_of(CacheType::kFloat16, {{1, 5, 9, 0, 0}, {2, 700, 1100, 33, 3}, {1, 62, 0, 0, 0}}),
    layout_of(CacheType::kInt8, {{1, 1500, 0, 7, 2}, {2, 21, 0, 0, 0}, {1, 900, 2100, 40, 0}}),
    layout_of(CacheType::kFloat16, {{1, 800, 0, 16, 0}, {1, 600, 0, 16, 0}}),
    layout_of(CacheType::kFloat16, {{1, 800, 0, 1, 0}, {1, 600, 0, 1, 5}, {1, 3, 0, 0, 0}}),
};

inline std::vector<CacheLayout> all_layouts() {
  std::vector<CacheLayout> all(std::begin(kLayouts), std::end(kLayouts));
  all.insert(all.end(), std::begin(kMixed), std::end(kMixed));
  return all;
}

class FakeModel : public EngineModel {
 public:
  // rows, chunk: what a model file may fix, see Description.
  explicit FakeModel(const CacheLayout& layout = kLayouts[0], char digit = 'a', int64_t rows = 0,
                     int64_t chunk = 0) {
    info_.description.vocab_size = kVocab;
    info_.description.max_positions = kMaxPositions;
    info_.description.cache = layout.type;
    info_.description.cache_rows = rows;
    info_.description.prefill_chunk = chunk;
    info_.description.kinds.resize(1);  // rows that do not depend on positions
    info_.description.pattern.resize(static_cast<size_t>(layout.tensors.back().layer) + 1);
    info_.layout = layout;
    info_.fingerprint = std::string(64, digit);
  }
  const ModelInfo& info() const override { return info_; }
  ModelInfo& change() { return info_; }  // before a session is opened
  void release_pages() const override {}
  std::unique_ptr<EngineState> open(const CacheView& cache) const override {
    return std::make_unique<FakeState>(cache, probe);
  }
  mutable Probe probe;

 private:
  ModelInfo info_;
};

}  // namespace edge_qkv::test
