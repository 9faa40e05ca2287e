// A session on a tiny engine whose rows and logits can be worked out by hand.
#include "core/session.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <thread>

#include "attention/cpu.h"
#include "core/overflow.h"
#include "core/random.h"
#include "fake_engine.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

namespace {

std::vector<int32_t> some_tokens(size_t count) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>(scramble(i) % kVocab);
  return tokens;
}

// The logits [tokens, kVocab] of a session that keeps all rows.
std::vector<float> all_logits(const std::shared_ptr<FakeModel>& model,
                              const std::vector<int32_t>& tokens) {
  Session session(model, {kMaxPositions, 50, {}, kMaxPositions});
  std::vector<float> logits(tokens.size() * kVocab);
  session.evaluate(tokens.data(), tokens.size(), logits.data());
  return logits;
}

bool same_logits(const float* a, const float* b) { return std::equal(a, a + kVocab, b); }

// Whether the rows that a query at position `at` sees are those that a session of `length` tokens keeps.
bool keeps_visible(const CacheLayout& layout, int64_t margin, int64_t length, int64_t at) {
  for (const CacheTensor& tensor : layout.tensors) {
    const int64_t behind = margin == 0 ? tensor.window : margin;
    for (int64_t row = 0; row < at; ++row) {
      const bool seen = tensor.window == 0 || row < tensor.sinks || row > at - tensor.window;
      const bool kept =
          tensor.window == 0 || row < tensor.sinks || row >= length - tensor.window - behind;
      if (seen && !kept) return false;
    }
  }
  return true;
}

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
  EXPECT(rows[1] == 0x03030303 && rows[2] != 0 && rows[49] != 0 && rows[50] == 0);
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
  for (const CacheLayout& layout : all_layouts()) {
    for (const OverflowOptions& overflow : {OverflowOptions{EQKV_OVERFLOW_WINDOW, 2, 50, 0},
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
  const std::vector<CacheLayout> layouts = all_layouts();
  for (size_t round = 0; round < 2 * layouts.size(); ++round) {
    const CacheLayout& layout = layouts[round / 2];
    const int64_t rows = round % 2 ? static_cast<int64_t>(page_bytes()) : 0;  // of the one beside, any
    const auto model = std::make_shared<FakeModel>(layout, 'a', rows);
    const auto plain_model = std::make_shared<FakeModel>(layout);
    // The one beside keeps all rows: nothing that it computes depends on which are given back.
    const SessionOptions options{700, 50, {}, round % 4 < 2 ? 0 : 3}, all{700, 50, {}, 700};
    const auto open = [&] { return std::make_unique<Session>(plain_model, all); };
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

TEST(windows,
     "a windowed layer sees the rows of its window at every depth, and keeps no others in RAM") {
  const std::vector<int32_t> tokens = some_tokens(260);
  for (const CacheLayout& layout : kMixed) {
    const auto model = std::make_shared<FakeModel>(layout);
    const std::vector<float> expected = all_logits(model, tokens);
    for (const int64_t margin : {0, 1, 6, 500}) {
      for (const int64_t chunk : {1, 7, 64}) {
        Session session(model, {300, chunk, {}, margin});
        std::vector<float> logits(static_cast<size_t>(chunk) * kVocab);
        for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(chunk)) {
          const size_t count = std::min(static_cast<size_t>(chunk), tokens.size() - at);
          session.evaluate(tokens.data() + at, count, logits.data());
          EXPECT(std::equal(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(count * kVocab),
                            expected.begin() + static_cast<std::ptrdiff_t>(at * kVocab)));
          if (at % 5 == 0 || chunk > 1) {
            EXPECT(session.cache().committed_bytes() <= session.cache_bytes(session.length()));
          }
        }
        uint64_t live = 0;
        for (const CacheTensor& tensor : layout.tensors) {
          live += layout.row_bytes(tensor) * static_cast<uint64_t>(tensor.kv_heads) *
                  static_cast<uint64_t>(live_rows(tensor, 260, margin).count());
        }
        EXPECT(session.cache().live_bytes(260) == live);
      }
    }
  }
}

TEST(rewind_windows,
     "a rewind evaluates again where rows are gone and only there, and is right at every length") {
  const int64_t length = 200;
  const std::vector<int32_t> tokens = some_tokens(static_cast<size_t>(length));
  for (const CacheLayout& layout : kMixed) {
    const auto model = std::make_shared<FakeModel>(layout);
    const std::vector<float> expected = all_logits(model, tokens);
    for (const int64_t margin : {0, 6}) {
      int64_t again = 0;
      std::vector<int64_t> lengths;  // at all boundaries, and some between them
      Session probe(model, {300, 48, {}, margin});
      probe.evaluate(tokens.data(), tokens.size(), nullptr);
      const auto keeps = [&](int64_t to) {
        return to >= length || keeps_visible(layout, margin, length, to);
      };
      for (int64_t to = 0; to <= length; ++to) {
        EXPECT(probe.can_go_back_to(to) == keeps(to));
        const bool boundary = to > 0 && (keeps(to) != keeps(to - 1) || keeps(to) != keeps(to + 1));
        if (boundary || to < 3 || to % 23 == 0) lengths.push_back(to);
      }
      for (const int64_t to : lengths) {
        Session session(model, {300, 48, {}, margin});
        session.evaluate(tokens.data(), tokens.size(), nullptr);
        const bool kept = keeps(to);
        std::vector<int64_t> told;
        const int64_t evaluated = session.rewind(to, [&](int64_t done, int64_t total) {
          EXPECT(total == to);
          told.push_back(done);
        });
        EXPECT(evaluated == (kept ? 0 : to) && session.length() == to);
        EXPECT(told.empty() == kept);
        if (!kept) {
          ++again;
          if (evaluated != to) continue;
          EXPECT(told.front() == std::min<int64_t>(48, to) && told.back() == to);
          EXPECT(same_logits(session.logits(), &expected[static_cast<size_t>(to - 1) * kVocab]));
        }
        // Twice: a rewind inside the margin, then on from there.
        if (to > 3 && session.can_go_back_to(to - 2)) session.rewind(to - 2);
        std::vector<float> logits(kVocab * static_cast<size_t>(length - session.length()));
        const size_t from = static_cast<size_t>(session.length());
        session.evaluate(tokens.data() + from, tokens.size() - from, logits.data());
        EXPECT(std::equal(logits.begin(), logits.end(),
                          expected.begin() + static_cast<std::ptrdiff_t>(from * kVocab)));
      }
      EXPECT(again > 0 || layout.tensors[0].window == 1);  // which needs no row but sinks
    }
  }
}

TEST(match_windows, "a prompt keeps no tokens whose rows are gone") {
  const std::vector<int32_t> tokens = some_tokens(200);
  for (const CacheLayout& layout : kMixed) {
    const auto model = std::make_shared<FakeModel>(layout);
    for (const size_t common :
         {size_t{1}, size_t{100}, size_t{150}, size_t{170}, size_t{199}, size_t{200}}) {
      Session session(model, {400, 48, {}, 4});
      session.evaluate(tokens.data(), tokens.size(), nullptr);
      std::vector<int32_t> prompt(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(common));
      prompt.resize(210, 0);
      if (common < 200) prompt[common] = (tokens[common] + 1) % kVocab;
      const int64_t held = static_cast<int64_t>(common);
      const bool kept = common == 200 || keeps_visible(layout, 4, 200, held);
      EXPECT(session.match(prompt.data(), prompt.size()) == (kept ? held : 0));
      const size_t from = static_cast<size_t>(session.length());
      session.evaluate(prompt.data() + from, prompt.size() - from, nullptr);
      const std::vector<float> expected = all_logits(model, prompt);
      EXPECT(same_logits(session.logits(), &expected[209 * kVocab]));
    }
  }
}

TEST(cancel_rewind, "a cancelled or failed rewind keeps what it has evaluated again") {
  const std::vector<int32_t> tokens = some_tokens(200);
  const auto model = std::make_shared<FakeModel>(kMixed[0]);
  const std::vector<float> expected = all_logits(model, tokens);
  for (const bool fails : {false, true}) {
    Session session(model, {300, 40});
    session.evaluate(tokens.data(), tokens.size(), nullptr);
    if (fails) {
      model->probe.fail_after = 2;
      EXPECT_ERROR(EQKV_ENGINE_FAILED, "broken", session.rewind(110));
    } else {
      EXPECT_ERROR(EQKV_CANCELLED, "after 80 tokens", session.rewind(110, [&](int64_t done, int64_t) {
        if (done == 80) session.cancel();
      }));
    }
    EXPECT(session.length() == 80 && same_logits(session.logits(), &expected[79 * kVocab]));
    session.evaluate(tokens.data() + 80, 120, nullptr);
    EXPECT(same_logits(session.logits(), &expected[199 * kVocab]));
    // One that was cancelled before it began changes nothing.
    session.cancel();
    EXPECT_ERROR(EQKV_CANCELLED, "after 200 tokens", session.rewind(110));
    EXPECT(session.length() == 200 && same_logits(session.logits(), &expected[199 * kVocab]));
  }
}

TEST(fill_windows, "a fill keeps and marks the rows that an evaluation would have kept") {
  for (const CacheLayout& layout : kMixed) {
    const auto model = std::make_shared<FakeModel>(layout);
    Session filled(model, {500, 16}), evaluated(model, {500, 16});
    const std::vector<int32_t> tokens = some_tokens(400);
    for (Session* session : {&filled, &evaluated}) session->evaluate(tokens.data(), 90, nullptr);
    filled.fill(400, 7);
    evaluated.evaluate(tokens.data() + 90, 310, nullptr);
    EXPECT(filled.cache().first_live() == evaluated.cache().first_live());
    EXPECT(filled.cache().committed_bytes() <= filled.cache_bytes(400));
    filled.evaluate(tokens.data(), 50, nullptr);  // sees rows of noise: none is gone
    EXPECT(filled.rewind(100) == (keeps_visible(layout, 0, 450, 100) ? 0 : 100));
  }
}

TEST(overflow_windows,
     "after tokens are dropped the session goes on like one that holds only the rest") {
  const OverflowOptions policies[] = {{EQKV_OVERFLOW_WINDOW, 0, 10, 0}, {EQKV_OVERFLOW_WINDOW, 0, 60, 0},
                                      {EQKV_OVERFLOW_WINDOW, 2, 50, 0}, {EQKV_OVERFLOW_WINDOW, 7, 80, 0},
                                      {EQKV_OVERFLOW_SHIFT, 0, 0, 30},  {EQKV_OVERFLOW_SHIFT, 0, 0, 140},
                                      {EQKV_OVERFLOW_WINDOW, 30, 10, 0}};
  const std::vector<int32_t> tokens = some_tokens(900);
  for (const CacheLayout& layout : kMixed) {
    const auto model = std::make_shared<FakeModel>(layout);
    for (const OverflowOptions& policy : policies) {
      const bool alike = &layout == &kMixed[3];  // one window: less may be kept than it sees
      if (policy.sinks == 30 && !alike && &layout != &kMixed[4]) continue;
      for (const int64_t margin : {0, 2}) {
        Session session(model, {150, 16, policy, margin});
        for (size_t at = 0; at < tokens.size();) {
          const size_t count = 1 + scramble(at) % 40;
          const size_t some = std::min(count, tokens.size() - at);
          const int64_t dropped = session.dropped();
          session.evaluate(tokens.data() + at, some, nullptr);
          at += some;
          if (session.dropped() == dropped) continue;
          const std::vector<float> expected = all_logits(model, session.tokens());
          EXPECT(same_logits(session.logits(), &expected[expected.size() - kVocab]));
          EXPECT(session.cache().committed_bytes() <= session.cache_bytes(session.length()));
        }
        EXPECT(session.dropped() > 500);
        // Back beyond what is left of the windows: the
        // tokens that the session holds are evaluated again.
        const std::vector<int32_t> held = session.tokens();
        const int64_t to = session.length() / 3;
        session.rewind(to);
        session.evaluate(held.data() + to, held.size() - static_cast<size_t>(to), nullptr);
        const std::vector<float> expected = all_logits(model, held);
        EXPECT(same_logits(session.logits(), &expected[expected.size() - kVocab]));
      }
    }
  }
}

TEST(overflow_refused, "a policy under which a window would see the sinks out of place is refused") {
  const auto open = [](const CacheLayout& layout, const OverflowOptions& policy) {
    Session(std::make_shared<FakeModel>(layout), {150, 16, policy});
  };
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "see only the last 50",
               open(kMixed[0], {EQKV_OVERFLOW_WINDOW, 4, 49, 0}));
  open(kMixed[0], {EQKV_OVERFLOW_WINDOW, 4, 50, 0});
  // A layer that always sees these sinks sees them where they are.
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "at least 20", open(kMixed[0], {EQKV_OVERFLOW_WINDOW, 3, 19, 0}));
  open(kMixed[0], {EQKV_OVERFLOW_WINDOW, 3, 20, 0});
  open(kMixed[0], {EQKV_OVERFLOW_WINDOW, 0, 10, 0});
  open(kMixed[3], {EQKV_OVERFLOW_WINDOW, 4, 10, 0});  // one window
  const auto learned = std::make_shared<FakeModel>();
  learned->change().description.learned_positions = true;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "learned positions",
               Session(learned, {10, 4, {EQKV_OVERFLOW_SHIFT, 0, 0, 5}}));
}

// Rows as layers of a kind write them: values of the row of a token at a position.
TEST(moved_rows, "a dropped row's place is taken by the row that would have been written there") {
  for (const CacheType type : {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8}) {
    Description model;
    model.kinds.resize(3);
    model.kinds[0].positions = Positions::kRotaryConjugate;
    model.kinds[0].frequencies = {1, 0.31, 0.007};
    model.kinds[1].positions = Positions::kRotaryConjugate;
    model.kinds[1].rotary_offset = 9;
    model.kinds[1].frequencies = {0.5, 0.01};
    model.kinds[2].positions = Positions::kRotaryOnRead;
    model.kinds[2].frequencies = {1, 0.1};
    model.pattern = {0, 1, 0, 2};
    const CacheLayout layout =
        layout_of(type, {{2, 8, 0, 30, 2}, {1, 15, 6, 0, 0}, {1, 8, 11, 25, 0}, {1, 10, 0, 0, 0}});
    CacheMemory memory(layout, 200);
    std::vector<float> row(64);
    // Value i of the row of `token`, written at `position`, before it is rounded.
    const auto write = [&](size_t tensor, int64_t token, int64_t position) {
      const CacheTensor& t = layout.tensors[tensor];
      const LayerKind& kind = model.layer(static_cast<size_t>(t.layer));
      for (int64_t i = 0; i < t.dim; ++i) {
        row[static_cast<size_t>(i)] = static_cast<float>(
            unit_interval(scramble(static_cast<uint64_t>(token * 1000 + i) ^ tensor << 40)) - 0.5);
      }
      if (t.part == Part::kValue || kind.positions != Positions::kRotaryConjugate) return;
      const size_t half = kind.frequencies.size(), offset = static_cast<size_t>(kind.rotary_offset);
      for (size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(position) * kind.frequencies[i];
        const double a = row[offset + i], b = row[offset + half + i];
        row[offset + i] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
        row[offset + half + i] = static_cast<float>(b * std::cos(angle) + a * std::sin(angle));
      }
    };
    const auto scale = [&](size_t tensor, int64_t head, int64_t at) -> uint16_t* {
      for (size_t i = 0; i < layout.tensors.size(); ++i) {
        const CacheTensor &t = layout.tensors[i], &rows = layout.tensors[tensor];
        if (t.scales && t.layer == rows.layer && t.part == rows.part) {
          return reinterpret_cast<uint16_t*>(memory.view().row({i, head}, at));
        }
      }
      return nullptr;
    };
    const Kernel& kernel = active_kernel();
    std::vector<int64_t> tokens;  // in each row
    for (int64_t at = 0; at < 200; ++at) tokens.push_back(at);
    for (const Slab& slab : layout.slabs()) {
      for (int64_t at = 0; at < 200 && !layout.tensors[slab.tensor].scales; ++at) {
        write(slab.tensor, at, at);
        kernel.write_row(type, row.data(), memory.view().row(slab, at),
                         scale(slab.tensor, slab.head, at), layout.tensors[slab.tensor].dim);
      }
    }
    memory.grow_to(200);
    int64_t length = 200;
    for (const RowSpan& dropped : {RowSpan{2, 100}, RowSpan{2, 60}}) {
      EXPECT(memory.drops(dropped.begin, dropped.end, length));
      EXPECT(!memory.drops(0, 5, length));  // the next rows would be sinks, and are gone
      drop_rows(memory, model, dropped, length);
      tokens.erase(tokens.begin() + dropped.begin, tokens.begin() + dropped.end);
      length = static_cast<int64_t>(tokens.size());
      // Rows of 8 to 15 values up to 0.9, which are rounded twice more.
      const double tolerance = type == CacheType::kFloat32   ? 1e-5
                               : type == CacheType::kFloat16 ? 2e-3
                                                             : 0.02;
      std::vector<float> got(64);
      for (const Slab& slab : layout.slabs()) {
        const CacheTensor& t = layout.tensors[slab.tensor];
        if (t.scales) continue;
        for (const RowSpan& rows : memory.live(slab.tensor, 0, length)) {
          for (int64_t at = rows.begin; at < rows.end; ++at) {
            write(slab.tensor, tokens[static_cast<size_t>(at)], at);
            kernel.read_row(type, memory.view().row(slab, at), scale(slab.tensor, slab.head, at),
                            got.data(), t.dim);
            for (size_t i = 0; i < static_cast<size_t>(t.dim); ++i) {
              EXPECT(std::abs(got[i] - row[i]) < tolerance);
            }
          }
        }
      }
    }
  }
}
