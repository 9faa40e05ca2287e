// A tiny engine whose rows and logits can be worked out by hand.
#pragma once

#include <atomic>
#include <cstring>
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

// Every byte of row i of slab s is (token i) + s. The largest logit of a position is the token (sum of
// all tokens up to there) mod vocabulary, read back from the cache; the one behind it is a hash of every
// byte of the cache up to there.
class FakeState : public EngineState {
 public:
  FakeState(const CacheView& cache, Probe& probe) : probe_(probe), cache_(cache) {}

  void forward(const int32_t* tokens, size_t count, int64_t past, size_t logit_rows,
               float* logits) override {
    probe_.chunks.push_back(count);
    probe_.logit_rows.push_back(logit_rows);
    probe_.running = true;
    while (probe_.wait && !interrupted_) std::this_thread::yield();
    if (interrupted_) throw Error(EQKV_ENGINE_FAILED, "interrupted");
    if (probe_.fail_after-- == 0) throw Error(EQKV_ENGINE_FAILED, "broken");
    for (int64_t slab = 0; slab < cache_.layout.slabs(); ++slab) {
      const size_t bytes = cache_.layout.row_bytes(slab / cache_.layout.kv_heads);
      std::byte* at = cache_.slab(slab) + bytes * static_cast<size_t>(past);
      for (size_t i = 0; i < count; ++i, at += bytes) {
        std::memset(at, static_cast<int>(tokens[i] + slab), bytes);
      }
    }
    std::memset(logits, 0, logit_rows * kVocab * sizeof *logits);
    for (size_t i = 0; i < logit_rows; ++i) {
      const size_t rows = static_cast<size_t>(past) + count - logit_rows + i + 1;
      float* out = logits + i * kVocab;
      size_t sum = 0;
      for (size_t row = 0; row < rows; ++row) {
        sum += static_cast<size_t>(cache_.row(0, 0, static_cast<int64_t>(row))[0]);
      }
      out[sum % kVocab] = 1;
      out[(sum + 1) % kVocab] = -static_cast<float>(hash(rows) % 1000);
    }
  }

  void interrupt() noexcept override { interrupted_ = true; }
  void resume() noexcept override { interrupted_ = false; }

 private:
  uint64_t hash(size_t rows) const {
    uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    for (int64_t slab = 0; slab < cache_.layout.slabs(); ++slab) {
      const size_t bytes = rows * cache_.layout.row_bytes(slab / cache_.layout.kv_heads);
      const std::byte* at = cache_.slab(slab);
      for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<uint64_t>(at[i])) * 0x100000001b3u;
    }
    return hash;
  }

  Probe& probe_;
  const CacheView cache_;
  std::atomic<bool> interrupted_{false};
};

class FakeModel : public EngineModel {
 public:
  // rows, chunk: what a model file may fix, see ModelInfo.
  explicit FakeModel(const CacheLayout& cache = {CacheType::kFloat32, 1, 1, 1, 1}, char digit = 'a',
                     int64_t rows = 0, int64_t chunk = 0) {
    info_.vocab_size = kVocab;
    info_.max_positions = kMaxPositions;
    info_.cache = cache;
    info_.cache_rows = rows;
    info_.prefill_chunk = chunk;
    info_.fingerprint = std::string(64, digit);
  }
  const ModelInfo& info() const override { return info_; }
  void release_pages() const override {}
  std::unique_ptr<EngineState> open(const CacheView& cache) const override {
    return std::make_unique<FakeState>(cache, probe);
  }
  mutable Probe probe;

 private:
  ModelInfo info_;
};

// type, layers, caches, kv heads, head_dim: one of each kind, none with rows that fill pages evenly
// except the first.
inline const CacheLayout kLayouts[] = {
    {CacheType::kFloat32, 1, 1, 1, 1},  {CacheType::kFloat16, 3, 1, 1, 62},
    {CacheType::kFloat32, 2, 2, 3, 31}, {CacheType::kInt8, 2, 1, 1, 62},
    {CacheType::kInt8, 2, 2, 2, 21},
};

}  // namespace edge_qkv::test
