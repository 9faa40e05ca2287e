// A session on a tiny engine whose rows and logits can be worked out by hand.
#include "core/session.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "test.h"

using namespace edge_qkv;

namespace {

constexpr int64_t kVocab = 10, kMaxPositions = 1000;

// What a test sees of the engine, and how it makes it fail.
struct Probe {
  std::vector<size_t> chunks, logit_rows;
  std::atomic<bool> running{false};
  bool wait = false;  // until interrupted
  int fail_after = -1;
};

// A row of the cache is its token. The largest logit of a position is the token (sum of all tokens up to
// there) mod vocabulary, read back from the cache.
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
    auto* rows = reinterpret_cast<float*>(cache_.tensors[0]);
    for (size_t i = 0; i < count; ++i)
      rows[static_cast<size_t>(past) + i] = static_cast<float>(tokens[i]);
    std::memset(logits, 0, logit_rows * kVocab * sizeof *logits);
    for (size_t i = 0; i < logit_rows; ++i) {
      const size_t position = static_cast<size_t>(past) + count - logit_rows + i;
      int64_t sum = 0;
      for (size_t j = 0; j <= position; ++j) sum += static_cast<int64_t>(rows[j]);
      logits[i * kVocab + static_cast<size_t>(sum % kVocab)] = 1;
    }
  }

  void interrupt() noexcept override { interrupted_ = true; }
  void resume() noexcept override { interrupted_ = false; }

 private:
  Probe& probe_;
  const CacheView cache_;
  std::atomic<bool> interrupted_{false};
};

class FakeModel : public EngineModel {
 public:
  FakeModel() {
    info_.vocab_size = kVocab;
    info_.max_positions = kMaxPositions;
    info_.cache = {CacheType::kFloat32, 1, 1, 1, 1};
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

struct Fixture {
  explicit Fixture(int64_t context = 100, int64_t chunk = 4)
      : model(std::make_shared<FakeModel>()), session(model, {context, chunk, {}}) {}

  void evaluate(const std::vector<int32_t>& tokens, float* logits = nullptr) {
    session.evaluate(tokens.data(), tokens.size(), logits);
  }
  Probe& probe() { return model->probe; }

  std::shared_ptr<FakeModel> model;
  Session session;
};

}  // namespace

TEST(evaluate, "prefill and decode see every token before them") {
  Fixture f;
  f.evaluate({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT(f.session.sample() == 45 % kVocab);
  f.evaluate({3});
  EXPECT(f.session.sample() == 48 % kVocab);
  EXPECT(f.session.length() == 10 && f.session.tokens()[9] == 3);
  EXPECT(f.session.sample() == 48 % kVocab);  // sampling appends nothing
}

TEST(chunks, "prefill runs in chunks and computes one row of logits each") {
  Fixture f;
  f.evaluate({1, 2, 3, 4, 5, 6, 7, 8, 9});
  EXPECT((f.probe().chunks == std::vector<size_t>{4, 4, 1}));
  EXPECT((f.probe().logit_rows == std::vector<size_t>{1, 1, 1}));
}

TEST(all_logits, "all logits are given when asked for") {
  Fixture f;
  std::vector<float> logits(6 * kVocab);
  f.evaluate({1, 2, 3, 4, 5, 6}, logits.data());
  const int sums[] = {1, 3, 6, 10, 15, 21};
  for (size_t i = 0; i < 6; ++i) EXPECT(logits[i * kVocab + static_cast<size_t>(sums[i] % kVocab)] == 1);
  EXPECT(f.session.sample() == 1);
  EXPECT(f.session.logits()[1] == 1);
}

TEST(nothing, "no tokens change nothing") {
  Fixture f;
  f.evaluate({7});
  f.evaluate({});
  EXPECT(f.session.sample() == 7 && f.session.length() == 1);
}

TEST(no_logits, "there are no logits before the first token and after a rewind") {
  Fixture f;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", f.session.logits());
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", f.session.sample());
  f.evaluate({1, 2});
  f.session.rewind(2);
  EXPECT(f.session.sample() == 3);
  f.session.rewind(1);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", f.session.sample());
}

TEST(rewind_session, "after a rewind the session goes on as if the rest had never been") {
  Fixture f;
  f.evaluate({1, 2, 3, 4, 5});
  f.session.rewind(2);
  EXPECT(f.session.length() == 2);
  f.evaluate({9});
  EXPECT(f.session.sample() == 12 % kVocab);
  f.session.rewind(0);
  f.evaluate({5});
  EXPECT(f.session.sample() == 5);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "holds 1", f.session.rewind(2));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "-1", f.session.rewind(-1));
}

TEST(full, "tokens that do not fit are refused as a whole, with numbers and a remedy") {
  Fixture f(10);
  f.evaluate({1, 2, 3, 4, 5, 6});
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "5 more tokens do not fit: 6 of the 10", f.evaluate({1, 2, 3, 4, 5}));
  EXPECT(f.session.length() == 6);
  f.evaluate({1, 2, 3, 4});
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "larger context", f.evaluate({1}));
  const int32_t token = 0;
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "do not fit", f.session.evaluate(&token, SIZE_MAX, nullptr));
  EXPECT(f.session.sample() == 31 % kVocab);
}

TEST(vocabulary, "tokens outside the vocabulary are refused before anything runs") {
  Fixture f;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "Token 10 at position 2", f.evaluate({1, 2, 10, 3}));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "Token -1 at position 0", f.evaluate({-1}));
  EXPECT(f.session.length() == 0 && f.probe().chunks.empty());
}

TEST(contexts, "a context outside the model's positions is refused") {
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "at least 1", Fixture(0));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "at least 1", Fixture(INT64_MIN));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "at most 1000", Fixture(1001));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "at most 1000", Fixture(INT64_MAX));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "chunk", Fixture(10, -1));
  Fixture f(1000, INT64_MAX);
  f.evaluate(std::vector<int32_t>(1000, 1));
  EXPECT(f.probe().chunks.size() == 1);
}

TEST(failure, "after a failed chunk the chunks before it stay, with their logits") {
  Fixture f;
  f.probe().fail_after = 1;
  EXPECT_ERROR(EQKV_ENGINE_FAILED, "broken", f.evaluate({1, 2, 3, 4, 5, 6}));
  EXPECT(f.session.length() == 4);
  EXPECT(f.session.sample() == 10 % kVocab);
  f.evaluate({5, 6});
  EXPECT(f.session.sample() == 21 % kVocab);
}

TEST(cancel_next, "a cancel while nothing runs stops the next evaluate, once") {
  Fixture f;
  f.evaluate({1});
  f.session.cancel();
  EXPECT_ERROR(EQKV_CANCELLED, "after 1 tokens", f.evaluate({2}));
  EXPECT(f.session.sample() == 1);
  f.evaluate({2});
  EXPECT(f.session.sample() == 3);
}

TEST(cancel_running, "a cancel stops the evaluate that runs") {
  Fixture f;
  f.evaluate({1});
  f.probe().running = false;
  f.probe().wait = true;
  std::thread other([&] {
    while (!f.probe().running) std::this_thread::yield();
    f.session.cancel();
  });
  EXPECT_ERROR(EQKV_CANCELLED, "after 1 tokens", f.evaluate({2, 3}));
  other.join();
  f.probe().wait = false;
  EXPECT(f.session.length() == 1);
  f.evaluate({2, 3});
  EXPECT(f.session.sample() == 6);
}

TEST(cancel_storm, "however many cancels, every evaluate finishes or is cancelled") {
  Fixture f(kMaxPositions, 1);
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) f.session.cancel();
  });
  int64_t evaluated = 0;
  for (int i = 0; i < 20000 && f.session.length() < kMaxPositions - 4; ++i) {
    try {
      f.evaluate({1, 1, 1});
      evaluated += 3;
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_CANCELLED);
      evaluated = f.session.length();
    }
  }
  done = true;
  other.join();
  EXPECT(f.session.length() == evaluated);
  try {
    f.evaluate({1});  // one may be left
  } catch (const Error&) {
  }
  f.session.rewind(0);
  f.evaluate({4});
  EXPECT(f.session.sample() == 4);
}

TEST(fill, "fill writes rows and a history of zeros") {
  Fixture f;
  f.evaluate({1, 2});
  f.session.fill(50, 3);
  EXPECT(f.session.length() == 50 && f.session.tokens()[1] == 2 && f.session.tokens()[49] == 0);
  const auto* rows = reinterpret_cast<const float*>(f.session.cache().view().tensors[0]);
  EXPECT(rows[1] == 2 && rows[2] != 0 && rows[49] != 0 && rows[50] == 0);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", f.session.logits());
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "already holds 50", f.session.fill(49, 3));
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "51 more tokens", f.session.fill(101, 3));
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "do not fit", f.session.fill(INT64_MAX, 3));
  f.evaluate({1});
  EXPECT(f.session.length() == 51);
}
