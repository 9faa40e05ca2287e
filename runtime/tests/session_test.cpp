// A session on a tiny engine whose rows and logits can be worked out by hand.
#include "core/session.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <thread>

#include "core/random.h"
#include "fake_engine.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

namespace {

struct Fixture {
  explicit Fixture(int64_t context = 100, int64_t chunk = 4)
      : model(std::make_shared<FakeModel>()), session(model, {context, chunk}) {}

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
  const auto* rows = reinterpret_cast<const uint32_t*>(f.session.cache().view().tensors[0]);
  EXPECT(rows[1] == 0x02020202 && rows[2] != 0 && rows[49] != 0 && rows[50] == 0);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", f.session.logits());
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "already holds 50", f.session.fill(49, 3));
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "51 more tokens", f.session.fill(101, 3));
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "do not fit", f.session.fill(INT64_MAX, 3));
  f.evaluate({1});
  EXPECT(f.session.length() == 51);
}

TEST(match, "a prompt keeps the beginning that it shares with the session") {
  struct Case {
    std::vector<int32_t> prompt;
    int64_t kept;
  };
  const Case cases[] = {
      {{1, 2, 3, 4, 5, 6}, 5},  // goes on: nothing is evaluated again
      {{1, 2, 3, 9, 5}, 3},     // differs in the middle
      {{9}, 0},                 // differs from the start
      {{1, 2, 3}, 2},           // is a part: its last token gives the logits
      {{1, 2, 3, 4, 5}, 5},     // is all of it, and the logits are there
      {{}, 0},
  };
  for (const Case& c : cases) {
    Fixture f;
    f.evaluate({1, 2, 3, 4, 5});
    EXPECT(f.session.match(c.prompt.data(), c.prompt.size()) == c.kept);
    EXPECT(f.session.length() == c.kept);
    f.evaluate({c.prompt.begin() + c.kept, c.prompt.end()});
    EXPECT(f.session.tokens() == c.prompt);
    int32_t sum = 0;
    for (const int32_t token : c.prompt) sum += token;
    if (!c.prompt.empty()) EXPECT(f.session.sample() == sum % kVocab);
  }
  Fixture f;
  f.evaluate({1, 2, 3});
  f.session.rewind(2);
  const int32_t prompt[] = {1, 2};
  EXPECT(f.session.match(prompt, 2) == 1);  // without logits the last token is evaluated again
}

TEST(empty_session, "a session without tokens is forked, spilled and saved like any other") {
  const TemporaryDirectory directory;
  Fixture f;
  f.session.spill(directory.path());
  const auto child = f.session.fork(directory.path());
  f.session.save(directory / "empty");
  Fixture other;
  other.evaluate({1, 2});
  other.session.restore(directory / "empty");
  for (Session* session : {&f.session, child.get(), &other.session}) {
    EXPECT(session->length() == 0);
    EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", session->logits());
    const int32_t token = 7;
    session->evaluate(&token, 1, nullptr);
    EXPECT(session->sample() == 7);
  }
}

TEST(fork_options, "a fork has the context, tokens and logits of its parent, and a sampler of its own") {
  Fixture f(6, 2);
  f.evaluate({1, 2, 3});
  SamplerOptions sampler;
  sampler.temperature = 1;
  sampler.min_p = 0.9f;
  f.session.set_sampler(sampler);
  const auto child = f.session.fork();
  EXPECT(child->tokens() == f.session.tokens() && child->sample() == 6);
  const int32_t tokens[] = {1, 1, 1, 1};
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "3 of the 6", child->evaluate(tokens, 4, nullptr));
  f.probe().chunks.clear();
  child->evaluate(tokens, 3, nullptr);
  EXPECT((f.probe().chunks == std::vector<size_t>{2, 1}));
  EXPECT(f.session.length() == 3 && child->sample() == 9);
}

TEST(fixed_chunk, "a chunk is never larger than the model takes") {
  const auto model = std::make_shared<FakeModel>(kLayouts[0], 'a', 0, 3);
  for (const int64_t asked : {int64_t{0}, int64_t{50}, int64_t{2}}) {
    Session session(model, {100, asked});
    model->probe.chunks.clear();
    const std::vector<int32_t> tokens(7, 1);
    session.evaluate(tokens.data(), tokens.size(), nullptr);
    const std::vector<size_t> threes{3, 3, 1}, twos{2, 2, 2, 1};
    EXPECT(model->probe.chunks == (asked == 2 ? twos : threes));
  }
}

TEST(fixed_rows, "a session's context stays its own where the model file fixes more rows") {
  const int64_t rows = static_cast<int64_t>(page_bytes());
  Session session(std::make_shared<FakeModel>(kLayouts[2], 'a', rows), {10, 4});
  EXPECT(session.context() == 10 && session.cache().view().capacity == rows);
  const std::vector<int32_t> tokens(11, 1);
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "0 of the 10", session.evaluate(tokens.data(), 11, nullptr));
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "11 more tokens", session.fill(11, 1));
  session.evaluate(tokens.data(), 10, nullptr);
  EXPECT(session.sample() == 0);
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "of 999 rows, too few for a context of 1000",
               Session(std::make_shared<FakeModel>(kLayouts[0], 'a', 999), {1000, 4}));
}

TEST(fixed_rows_overflow, "tokens are dropped at the end of the context, not of the fixed rows") {
  const TemporaryDirectory directory;
  const int64_t rows = static_cast<int64_t>(page_bytes());
  for (const CacheLayout& layout : kLayouts) {
    for (const OverflowOptions& overflow : {OverflowOptions{EQKV_OVERFLOW_WINDOW, 2, 20, 0},
                                            OverflowOptions{EQKV_OVERFLOW_SHIFT, 0, 0, 30}}) {
      Session fixed(std::make_shared<FakeModel>(layout, 'a', rows), {100, 8, overflow});
      Session free(std::make_shared<FakeModel>(layout), {100, 8, overflow});
      std::vector<int32_t> tokens(333);
      for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % kVocab);
      for (Session* session : {&fixed, &free}) {
        session->evaluate(tokens.data(), 150, nullptr);
        session->spill(directory.path());
        session->evaluate(tokens.data() + 150, tokens.size() - 150, nullptr);
      }
      EXPECT(fixed.dropped() == free.dropped() && fixed.dropped() >= 233 && fixed.length() <= 100);
      EXPECT(fixed.tokens() == free.tokens());
      EXPECT(std::equal(fixed.logits(), fixed.logits() + kVocab, free.logits()));
    }
  }
}

// Sessions that are saved, restored, forked, spilled and rewound in every order, each beside one to
// which only tokens happen: they must agree to the last byte of the cache at every step.
TEST(in_between, "nothing that moves a session's rows changes what it computes") {
  const TemporaryDirectory directory;
  struct Pair {
    std::unique_ptr<Session> session, plain;
  };
  uint64_t counter = 0;
  const auto random = [&](size_t below) { return static_cast<size_t>(scramble(++counter) % below); };
  for (size_t round = 0; round < 2 * std::size(kLayouts); ++round) {
    const CacheLayout& layout = kLayouts[round / 2];
    const int64_t rows = round % 2 ? static_cast<int64_t>(page_bytes()) : 0;  // of the one beside, any
    const auto model = std::make_shared<FakeModel>(layout, 'a', rows);
    const auto plain_model = std::make_shared<FakeModel>(layout);
    const SessionOptions options{700, 50};
    const auto open = [&] { return std::make_unique<Session>(plain_model, options); };
    std::vector<Pair> pairs;
    pairs.push_back({std::make_unique<Session>(model, options), open()});
    const auto path = [&](size_t i) { return directory / ("snapshot" + std::to_string(i)); };
    std::vector<std::vector<int32_t>> saved(3);  // the tokens in each snapshot
    for (size_t i = 0; i < saved.size(); ++i) pairs[0].session->save(path(i));
    for (int step = 0; step < 150; ++step) {
      const size_t at = random(pairs.size());
      Session& session = *pairs[at].session;
      Session& plain = *pairs[at].plain;
      const auto replay = [&](Session& fresh, const std::vector<int32_t>& tokens) {
        const int64_t kept = fresh.match(tokens.data(), tokens.size());
        fresh.evaluate(tokens.data() + kept, tokens.size() - static_cast<size_t>(kept), nullptr);
      };
      switch (random(8)) {
        case 0: {
          const int64_t length = static_cast<int64_t>(random(static_cast<size_t>(session.length()) + 1));
          session.rewind(length);
          plain.rewind(length);
          break;
        }
        case 1: {
          const size_t file = random(saved.size());
          session.save(path(file));
          saved[file] = session.tokens();
          break;
        }
        case 2: {
          const size_t file = random(saved.size());
          session.restore(path(file));
          replay(plain, saved[file]);
          break;
        }
        case 3:
          if (pairs.size() < 4) {
            Pair child{session.fork(random(2) ? directory.path() : ""), open()};
            replay(*child.plain, session.tokens());
            pairs.push_back(std::move(child));
          }
          break;
        case 4:
          if (pairs.size() > 1) pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(at));
          continue;
        default:
          session.spill(random(4) ? directory.path() : "");
          break;
      }
      const size_t room = static_cast<size_t>(session.context() - session.length());
      if (room == 0) continue;
      std::vector<int32_t> tokens(std::min(room, size_t{1} << random(8)));
      for (int32_t& token : tokens) token = static_cast<int32_t>(random(kVocab));
      session.evaluate(tokens.data(), tokens.size(), nullptr);
      plain.evaluate(tokens.data(), tokens.size(), nullptr);
      EXPECT(session.tokens() == plain.tokens());
      EXPECT(std::equal(session.logits(), session.logits() + kVocab, plain.logits()));
    }
  }
}
