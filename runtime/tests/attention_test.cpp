// Tests of the attention operator against a float64 reference that shares nothing with the kernel: full
// scores, full softmax, rotations by angle difference.
//
// Runs on the instruction set in use (EDGE_QKV_ISA forces
// one). --quick runs a reduced list, for emulators.
#include "attention_test.h"

#include <array>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "attention_problem.h"

using namespace edge_qkv;

namespace {

// Largest error of an output value, relative to the largest |reference| value of its token, over all
// heads (the row that the output projection multiplies; a single head of one value may cancel to
// nothing, where a relative error means nothing). fp32 arithmetic rounds every product and sum by at
// most 2^-24 = 6e-8. A score of magnitude 20 summed over head_dim carries an absolute error of about 20
// * 6e-8 * a small factor, which the exponential turns into a relative error of a weight; sums over tens
// of thousands of rows of either sign add rounding in proportion to the sum of magnitudes, ten times the
// result and more. 2e-5 leaves room for that on every instruction set, fused or not; a wrong row, mask
// or sign gives 1e-3 and more.
//
// Over int8 rows the queries and weights of some instruction sets are integers of 16 bits
// (attention_int8.h). A query here is off by 1.5e-5 of its largest value at most, a score of magnitude
// 20 so by some 1e-4 where all dimensions err together: 5e-4.
double bound(CacheType type) {
  const std::string isa = isa_name();
  const bool fp32 = isa == "baseline" || isa == "avx2" || isa == "armv8";
  return type == CacheType::kInt8 && !fp32 ? 5e-4 : 2e-5;
}

bool quick = false;

double worst_error[std::size(kTypes)] = {};  // of all cases so far, by CacheType

// Runs one case with every cache type; says what went wrong.
bool check(const Case& c, Pool& pool, size_t tasks) {
  bool good = true;
  for (CacheType type : kTypes) {
    Problem problem(c, type);
    const bool inside = problem.run(tasks, pool), written = inside && problem.rows_written();
    const double error = written ? problem.error() : 0;
    double& worst = worst_error[static_cast<int>(type)];
    worst = std::max(worst, error);
    if (inside && written && error <= bound(type)) continue;
    std::printf(
        "  B %lld T %lld past %lld H %d G %d D %d rotary %d R %d separate %d window %lld sinks %lld "
        "V %d O %d weight %d reads %d %s: ",
        (long long)c.batch, (long long)c.tokens, (long long)c.past, c.heads, c.kv_heads, c.dim,
        static_cast<int>(c.rotary), c.rotary_dim, c.separate, (long long)c.window, (long long)c.sinks,
        problem.p.value_dim, c.rotary_offset, c.key_weight, c.reads, cache_type_info(type).name);
    if (!inside) {
      std::printf("wrote where it may not\n");
    } else if (!written) {
      std::printf("wrong rows in the cache\n");
    } else {
      std::printf("relative error %.3g\n", error);
    }
    good = false;
  }
  return good;
}

bool check_all(const std::vector<Case>& cases, Pool& pool) {
  bool good = true;
  size_t tasks = 0;
  for (const Case& c : cases) good &= check(c, pool, 1 + tasks++ % 3);
  return good;
}

bool head_dims(Pool& pool) {
  std::vector<Case> cases;
  for (int dim : {1, 2, 7, 16, 31, 62, 64, 65, 80, 128, 192, 256, 512, 1024}) {
    if (quick && dim > 128) continue;
    for (bool separate : {false, true}) {
      cases.push_back({1, 70, 8, 1, dim, Rotary::kNone, 0, separate});
      cases.push_back({9, 60, 6, 2, dim, Rotary::kNone, 0, separate});
      cases.push_back({1, 33, 4, 4, dim, Rotary::kNone, 0, separate});
    }
  }
  return check_all(cases, pool);
}

bool head_ratios(Pool& pool) {
  std::vector<Case> cases;
  for (int ratio : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 71, 128}) {
    for (int64_t tokens : {1, 2, 5}) {
      if (quick && tokens == 2) continue;
      cases.push_back({tokens, 65, ratio, 1, 64});
      cases.push_back({tokens, 64, 2 * ratio, 2, 62, Rotary::kOnRead, 62, ratio % 2 == 0});
    }
  }
  return check_all(cases, pool);
}

bool tokens_and_depths(Pool& pool) {
  std::vector<Case> cases;
  for (int64_t tokens : {1, 2, 3, 7, 8, 9, 63, 64, 65, 300}) {
    for (int64_t past : {0, 1, 7, 63, 64, 65, 1023, 1024, 1025, 4097}) {
      if (tokens > 9 && past > 1024) continue;
      if (quick && (tokens > 9 || past > 1025) && tokens * past != 65) continue;
      cases.push_back({tokens, past, 4, 1, 64});
      cases.push_back({tokens, past, 3, 3, 16, Rotary::kConjugate, 16, past % 2 == 1});
    }
  }
  return check_all(cases, pool);
}

bool long_caches(Pool& pool) {
  std::vector<Case> cases = {{1, 4097, 32, 1, 64}, {3, 4090, 8, 2, 62, Rotary::kConjugate, 62}};
  if (!quick) {
    for (Rotary mode : kModes) {
      const int rotary_dim = mode == Rotary::kNone ? 0 : 64;
      cases.push_back({1, 33000, 32, 1, 64, mode, rotary_dim});
      cases.push_back({1, 33000, 4, 4, 64, mode, rotary_dim, true});
    }
    cases.push_back({2, 33000, 8, 2, 62, Rotary::kConjugate, 62, true, 2});
    cases.push_back({9, 33000, 4, 1, 80});
  }
  return check_all(cases, pool);
}

bool rotary_modes(Pool& pool) {
  std::vector<Case> cases;
  for (Rotary mode : {Rotary::kConjugate, Rotary::kOnRead}) {
    for (bool separate : {false, true}) {
      for (int dim : {2, 7, 62, 64, 80, 128}) {
        for (int rotary_dim : {2, 6, 32, 64, 62, 128}) {
          if (rotary_dim > dim) continue;
          cases.push_back({1, 100, 4, 2, dim, mode, rotary_dim, separate, 2});
          cases.push_back({17, 50, 8, 1, dim, mode, rotary_dim, separate});
        }
      }
    }
  }
  return check_all(cases, pool);
}

bool batches(Pool& pool) {
  std::vector<Case> cases;
  for (Rotary mode : kModes) {
    const int rotary_dim = mode == Rotary::kNone ? 0 : 64;
    cases.push_back({1, 130, 8, 2, 64, mode, rotary_dim, false, 3});
    cases.push_back({33, 5, 6, 3, 64, mode, rotary_dim, true, 2});
  }
  cases.push_back({70, 0, 16, 16, 128, Rotary::kNone, 0, true, 2});  // appends in parallel
  return check_all(cases, pool);
}

// Windows and sinks that end before, at and after the ends of tiles, splits, blocks and the cache. Rows
// that no query sees are NaN: reading one, masked or not, shows.
bool windows(Pool& pool) {
  constexpr struct {
    int64_t window, sinks;
  } kSights[] = {{1, 0},       {1, 1},    {3, 4},         {63, 0},       {64, 64},
                 {65, 1},      {20, 90},  {130, 70},      {1023, 0},     {1024, 4},
                 {1500, 1030}, {2049, 3}, {INT64_MAX, 7}, {9, INT64_MAX}};
  std::vector<Case> cases;
  size_t next = 0;
  for (const auto& sight : kSights) {
    for (int64_t past : {0, 1, 62, 63, 64, 65, 127, 200, 1024, 2111, 5000}) {
      for (int64_t tokens : {1, 2, 5, 70}) {
        if (tokens == 70 && past > 200 && past != 2111) continue;
        if (quick && ++next % 7 != 0) continue;
        const Rotary mode = kModes[cases.size() % 3];
        const bool separate = cases.size() / 3 % 2;
        const int dim = cases.size() % 5 ? 16 : 62, rotary_dim = mode == Rotary::kNone ? 0 : dim - 6;
        Case c = {tokens, past, 4, cases.size() % 4 ? 1 : 2, dim, mode, rotary_dim, separate};
        if (cases.size() % 7 == 0) c.heads = 32, c.kv_heads = 1;
        c.window = sight.window, c.sinks = sight.sinks;
        cases.push_back(c);
      }
    }
  }
  return check_all(cases, pool);
}

// ---- kinds of layers ----
// Each property of a problem has a few values; a problem is one index for each.

constexpr int64_t kManyTokens[] = {1, 2, 9, 40}, kDepths[] = {0, 5, 63, 200, 1100};
constexpr int kRatios[] = {1, 2, 3, 8, 17, 32, 64, 128}, kDims[] = {16, 62, 80, 192, 256, 288, 512, 576};
constexpr int kKvHeads[] = {1, 2};

// How wide a value is beside a key of D, and whether it is a row of its own.
constexpr struct {
  bool separate;
  int dim, least;  // D * dim / 4 + least
} kValues[] = {{false, 4, 0}, {false, 3, 1}, {false, 1, 0}, {true, 4, 0}, {true, 2, 1}, {true, 6, 0}};

// Where the rotated part lies: at the front, within, at the end of the row, or nowhere; whether keys
// have a weight.
enum Place { kFront, kWithin, kEnd };
constexpr struct {
  Rotary mode;
  Place place;
  bool weight;
} kPositions[] = {{Rotary::kNone, kFront, false},      {Rotary::kNone, kFront, true},
                  {Rotary::kConjugate, kFront, false}, {Rotary::kConjugate, kWithin, false},
                  {Rotary::kConjugate, kEnd, false},   {Rotary::kOnRead, kFront, true},
                  {Rotary::kOnRead, kWithin, true},    {Rotary::kOnRead, kEnd, false}};

constexpr struct {
  int64_t window, sinks;
} kSomeSights[] = {{0, 0}, {1, 0}, {64, 3}, {300, 70}};

constexpr int64_t kChoices[] = {std::size(kManyTokens), std::size(kDepths),     std::size(kRatios),
                                std::size(kDims),       std::size(kKvHeads),    std::size(kValues),
                                std::size(kPositions),  std::size(kSomeSights), 2};
constexpr size_t kProperties = std::size(kChoices);
using Chosen = std::array<int, kProperties>;

// False where the contract has no such problem, or the reference would take too long.
bool make_case(const Chosen& chosen, Case* c) {
  const auto& value = kValues[chosen[5]];
  const auto& positions = kPositions[chosen[6]];
  const auto& sight = kSomeSights[chosen[7]];
  const int dim = kDims[chosen[3]], value_dim = dim * value.dim / 4 + value.least;
  *c = {kManyTokens[chosen[0]],
        kDepths[chosen[1]],
        kRatios[chosen[2]] * kKvHeads[chosen[4]],
        kKvHeads[chosen[4]],
        dim,
        positions.mode};
  c->separate = value.separate, c->value_dim = value_dim;
  c->key_weight = positions.weight, c->window = sight.window, c->sinks = sight.sinks;
  c->reads = chosen[8];
  if (positions.mode != Rotary::kNone) {
    // A quarter of the row, which lies in a unified value or behind it.
    c->rotary_dim = dim / 8 * 2;
    c->rotary_offset = positions.place == kFront    ? 0
                       : positions.place == kWithin ? 5
                                                    : dim - c->rotary_dim;
    if (positions.mode == Rotary::kConjugate && !value.separate && c->rotary_offset < value_dim &&
        c->rotary_offset + c->rotary_dim > value_dim) {
      return false;
    }
  }
  return !(value.separate && positions.weight) &&
         c->tokens * c->heads * (c->past + c->tokens) * dim < (quick ? 2 << 20 : 20 << 20);
}

// Cases in which every two values of two properties meet that can, found greedily: of some random cases
// the one with most pairs that have not met.
std::vector<Case> pairwise() {
  std::set<std::array<int, 4>> open;  // property, value, property, value
  const auto pairs = [](const Chosen& chosen, auto visit) {
    for (int i = 0; i < static_cast<int>(kProperties); ++i) {
      for (int j = 0; j < i; ++j) visit({i, chosen[i], j, chosen[j]});
    }
  };
  std::mt19937 random(11);
  const auto draw = [&] {
    Chosen chosen;
    for (size_t i = 0; i < kProperties; ++i) chosen[i] = static_cast<int>(random() % kChoices[i]);
    return chosen;
  };
  Case c;
  for (int i = 0; i < 20000; ++i) {
    const Chosen chosen = draw();
    if (make_case(chosen, &c)) pairs(chosen, [&](std::array<int, 4> pair) { open.insert(pair); });
  }
  std::vector<Case> cases;
  while (!open.empty()) {
    Chosen best{};
    size_t most = 0;
    for (int i = 0; i < 200 || most == 0; ++i) {
      const Chosen chosen = draw();
      if (!make_case(chosen, &c)) continue;
      size_t met = 0;
      pairs(chosen, [&](std::array<int, 4> pair) { met += open.count(pair); });
      if (met > most) most = met, best = chosen;
    }
    pairs(best, [&](std::array<int, 4> pair) { open.erase(pair); });
    make_case(best, &c);
    cases.push_back(c);
  }
  return cases;
}

bool kinds_of_layers(Pool& pool) { return check_all(pairwise(), pool); }

// The result must be the same bit for bit on any number of tasks and threads.
bool task_counts(Pool& pool) {
  const std::vector<Case> cases = {{1, 5000, 32, 1, 64},
                                   {1, 3000, 2, 2, 62, Rotary::kConjugate, 32},
                                   {40, 200, 8, 2, 64, Rotary::kOnRead, 64},
                                   {5, 2100, 16, 1, 80, Rotary::kNone, 0, true, 2},
                                   {300, 0, 4, 4, 128, Rotary::kConjugate, 128, true},
                                   {2, 9000, 32, 1, 64, Rotary::kConjugate, 64, false, 1, 4000, 70},
                                   {40, 3000, 8, 2, 64, Rotary::kNone, 0, true, 1, 1500, 4}};
  for (const Case& c : cases) {
    if (quick && c.tokens > 100) continue;
    Problem problem(c, c.window ? CacheType::kInt8 : CacheType::kFloat16);
    std::vector<float> first;
    for (size_t tasks : {1, 2, 3, 7, 200}) {
      std::fill_n(problem.p.output, problem.outputs(), NAN);
      if (!problem.run(tasks, pool)) return false;
      const std::vector<float> now(problem.p.output, problem.p.output + problem.outputs());
      if (first.empty()) first = now;
      if (std::memcmp(first.data(), now.data(), now.size() * sizeof(float)) != 0) return false;
    }
  }
  return true;
}

// Prefill in chunks of any size is the prefill in one go.
bool chunked_prefill(Pool& pool) {
  for (size_t i = 0; i < 2 * std::size(kModes); ++i) {
    const Rotary mode = kModes[i / 2];
    const int rotary_dim = mode == Rotary::kNone ? 0 : 48;
    const int64_t tokens = quick ? 80 : 300;
    Case c = {tokens, 40, 8, 2, 64, mode, rotary_dim, mode == Rotary::kOnRead};
    if (i % 2) c.window = 50, c.sinks = 9;
    const CacheType type = i % 2 ? CacheType::kInt8 : CacheType::kFloat16;
    Problem problem(c, type);
    if (!problem.run(2, pool) || !(problem.error() <= bound(type))) return false;
    for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{1}, {64}, {1, 7, 63, 2}}) {
      const AttentionParams whole = problem.p;
      std::memset(problem.p.output, 0xff, problem.outputs() * sizeof(float));
      size_t next = 0;
      for (int64_t done = 0; done < tokens;) {
        AttentionParams& p = problem.p;
        p.tokens = std::min(chunks[next++ % chunks.size()], tokens - done);
        p.past = whole.past + done;
        p.query = whole.query + done * p.num_heads * p.head_dim;
        p.key = whole.key + done * p.kv_heads * p.head_dim;
        if (p.value) p.value = whole.value + done * p.kv_heads * p.value_dim;
        p.output = whole.output + done * p.num_heads * p.value_dim;
        if (!problem.run(2, pool)) return false;
        done += p.tokens;
      }
      problem.p = whole;
      if (!(problem.error() <= bound(type))) return false;
    }
  }
  return true;
}

// Scores far apart and of one sign, where a softmax without a running maximum over- or underflows.
bool large_scores(Pool& pool) {
  for (float scale : {30.0f, -30.0f}) {
    for (int heads : {1, 16}) {
      Problem problem({3, 200, heads, 1, 64}, CacheType::kFloat32);
      problem.p.scale = scale;
      if (!problem.run(2, pool)) return false;
      // Scores of thousands leave one weight, and their own rounding shifts it by 1e-3 at worst.
      if (!(problem.error() <= 1e-2)) return false;
    }
  }
  return true;
}

bool nothing_to_do(Pool& pool) {
  Problem problem({1, 10, 2, 1, 8}, CacheType::kFloat16);
  problem.p.tokens = 0;
  problem.p.query = problem.p.key = nullptr;
  return problem.run(2, pool) && std::isnan(problem.p.output[0]);
}

// ---- validation ----

void unify(AttentionParams& p) { p.value = nullptr, p.value_cache = nullptr; }

bool errors(Pool&) {
  const Problem sound({2, 3, 4, 2, 8, Rotary::kConjugate, 8, true}, CacheType::kFloat16);
  if (attention_error(sound.p)) return false;
  struct {
    const char* expected;
    void (*spoil)(AttentionParams& p);
  } const table[] = {
      {"batch", [](AttentionParams& p) { p.batch = 0; }},
      {"tokens", [](AttentionParams& p) { p.tokens = -1; }},
      {"past", [](AttentionParams& p) { p.past = -1; }},
      {"capacity", [](AttentionParams& p) { p.capacity = -1; }},
      {"num_heads", [](AttentionParams& p) { p.num_heads = 0; }},
      {"kv_heads", [](AttentionParams& p) { p.kv_heads = 0; }},
      {"kv_heads", [](AttentionParams& p) { p.kv_heads = -2; }},
      {"multiple of kv_heads", [](AttentionParams& p) { p.kv_heads = 3; }},
      {"head_dim", [](AttentionParams& p) { p.head_dim = 0; }},
      {"head_dim", [](AttentionParams& p) { p.head_dim = 1 << 30; }},
      {"scale", [](AttentionParams& p) { p.scale = NAN; }},
      {"cache type", [](AttentionParams& p) { p.cache_type = static_cast<CacheType>(7); }},
      {"rotary mode", [](AttentionParams& p) { p.rotary = static_cast<Rotary>(-1); }},
      {"rotary_dim", [](AttentionParams& p) { p.rotary = Rotary::kNone; }},
      {"rotary_dim", [](AttentionParams& p) { p.rotary_dim = 0; }},
      {"even", [](AttentionParams& p) { p.rotary_dim = 3; }},
      {"exceed head_dim", [](AttentionParams& p) { p.rotary_dim = 10; }},
      {"rows of the rotary tables", [](AttentionParams& p) { p.rotary_rows = 4; }},
      {"capacity", [](AttentionParams& p) { p.capacity = 4; }},
      {"capacity", [](AttentionParams& p) { p.past = INT64_MAX; }},
      {"capacity", [](AttentionParams& p) { p.tokens = INT64_MAX; }},
      {"address space", [](AttentionParams& p) { p.capacity = INT64_MAX / 4; }},
      {"address space", [](AttentionParams& p) { p.batch = INT64_MAX / 4; }},
      {"address space", [](AttentionParams& p) { p.rotary_rows = INT64_MAX / 4; }},
      {"query is null", [](AttentionParams& p) { p.query = nullptr; }},
      {"value_dim", [](AttentionParams& p) { p.value_dim = 0; }},
      {"value_dim", [](AttentionParams& p) { p.value_dim = 1 << 30; }},
      {"value_dim must not exceed", [](AttentionParams& p) { unify(p), p.value_dim = 9; }},
      {"rotary_offset must not", [](AttentionParams& p) { p.rotary_offset = -1; }},
      {"exceed head_dim", [](AttentionParams& p) { p.rotary_offset = 1; }},
      {"exceed head_dim", [](AttentionParams& p) { p.rotary_offset = INT_MAX; }},
      {"rotary_offset must be 0",
       [](AttentionParams& p) { p.rotary = Rotary::kNone, p.rotary_dim = 0, p.rotary_offset = 2; }},
      {"in its value or behind",
       [](AttentionParams& p) { unify(p), p.rotary_dim = 4, p.rotary_offset = 3, p.value_dim = 6; }},
      {"value must be null", [](AttentionParams& p) { p.key = nullptr; }},
      {"key_weight needs unified", [](AttentionParams& p) { p.key_weight = p.query; }},
      {"key_weight needs rows", [](AttentionParams& p) { unify(p), p.key_weight = p.query; }},
      {"address space", [](AttentionParams& p) { p.value_dim = 65536, p.capacity = INT64_MAX / 40; }},
      {"key_cache is null", [](AttentionParams& p) { p.key_cache = nullptr; }},
      {"output is null", [](AttentionParams& p) { p.output = nullptr; }},
      {"value", [](AttentionParams& p) { p.value = nullptr; }},
      {"value_cache", [](AttentionParams& p) { p.value_cache = nullptr; }},
      {"window must", [](AttentionParams& p) { p.window = -1; }},
      {"sinks must", [](AttentionParams& p) { p.sinks = -1; }},
      {"sinks need", [](AttentionParams& p) { p.sinks = 1; }},
      {"key_scales", [](AttentionParams& p) { p.cache_type = CacheType::kInt8; }},
      {"key_scales", [](AttentionParams& p) { p.key_scales = static_cast<uint16_t*>(p.key_cache); }},
      {"value_scales", [](AttentionParams& p) { p.value_scales = static_cast<uint16_t*>(p.key_cache); }},
      {"value_scales",
       [](AttentionParams& p) {
         p.cache_type = CacheType::kInt8, p.key_scales = static_cast<uint16_t*>(p.key_cache);
       }},
      {"value_scales",
       [](AttentionParams& p) {
         p.cache_type = CacheType::kInt8, p.value = nullptr, p.value_cache = nullptr;
         p.key_scales = p.value_scales = static_cast<uint16_t*>(p.key_cache);
       }},
      {"address space",
       [](AttentionParams& p) { p.cache_type = CacheType::kInt8, p.capacity = INT64_MAX / 19; }},
      {"table is null", [](AttentionParams& p) { p.cos = nullptr; }},
      {"table is null", [](AttentionParams& p) { p.sin = nullptr; }},
  };
  bool good = true;
  for (const auto& row : table) {
    AttentionParams p = sound.p;
    row.spoil(p);
    const char* error = attention_error(p);
    if (error && std::strstr(error, row.expected)) continue;
    std::printf("  expected an error about \"%s\", got: %s\n", row.expected, error ? error : "none");
    good = false;
  }
  return good;
}

// Engines size the workspace once, for the deepest cache.
bool workspace_grows_with_past(Pool&) {
  for (int64_t tokens : {1, 4, 64}) {
    for (int64_t window : {0, 3000, 100000}) {
      AttentionParams p;
      p.tokens = tokens, p.num_heads = 32, p.kv_heads = 1, p.head_dim = p.value_dim = 64;
      p.window = window, p.sinks = window / 3;
      size_t last = 0;
      for (p.past = 0; p.past < 200000; p.past += 501) {
        p.capacity = p.past + tokens;
        const size_t bytes = attention_workspace_bytes(p, 4);
        if (bytes < last || bytes > (4u << 20)) return false;
        last = bytes;
      }
    }
  }
  return true;
}

bool forced_choice(Pool&) {
  if (isa_error()) std::printf("  %s\n", isa_error());
  return isa_error() == nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--quick")) quick = true;
  }
  std::printf("instruction set: %s\n", isa_name());
  Pool pool(3);
  const struct {
    const char* name;
    bool (*run)(Pool& pool);
  } tests[] = {
      {"a forced instruction set is the one in use", forced_choice},
      {"halves become the same floats", halves_to_floats},
      {"floats become the nearest halves", floats_to_halves},
      {"unsound parameters are named", errors},
      {"the workspace never shrinks as the cache fills", workspace_grows_with_past},
      {"no tokens, no work", nothing_to_do},
      {"every head_dim", head_dims},
      {"every ratio of heads", head_ratios},
      {"every number of tokens at every depth", tokens_and_depths},
      {"long caches", long_caches},
      {"rotary modes", rotary_modes},
      {"batches", batches},
      {"windows and sinks", windows},
      {"kinds of layers", kinds_of_layers},
      {"int8 codes", codes},
      {"an int8 cache is near an fp32 one", int8_is_near_fp32},
      {"int8 rows and queries that are hard on integers", int8_adversaries},
      {"sums of int8 rows of any width", int8_sums_fit},
      {"queries that are no numbers", nan_queries},
      {"large scores", large_scores},
      {"the number of tasks changes nothing", task_counts},
      {"prefill in chunks", chunked_prefill},
  };
  int passed = 0, failed = 0;
  for (const auto& test : tests) {
    const bool good = test.run(pool);
    std::printf("%s: %s\n", good ? "ok" : "FAILED", test.name);
    std::fflush(stdout);
    good ? ++passed : ++failed;
  }
  std::printf("max relative error:");
  for (CacheType type : kTypes) {
    std::printf(" %s cache %.3g of %.3g;", cache_type_info(type).name,
                worst_error[static_cast<int>(type)], bound(type));
  }
  std::printf("\n");
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
