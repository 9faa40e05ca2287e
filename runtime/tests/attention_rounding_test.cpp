// Tests of attention_test about how numbers are rounded: halves, int8 codes, and the integers of which
// the products over int8 rows are made.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "attention_test.h"

namespace edge_qkv {

bool halves_to_floats(Pool&) {
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats(halves.size());
  std::vector<uint16_t> back(halves.size());
  active_kernel().half_to_float(halves.data(), floats.data(), halves.size());
  active_kernel().float_to_half(floats.data(), back.data(), halves.size());
  for (size_t i = 0; i < halves.size(); ++i) {
    const double want = half_value(halves[i]);
    if (std::isnan(want) ? !std::isnan(floats[i]) || !std::isnan(half_value(back[i]))
                         : floats[i] != want || std::signbit(floats[i]) != std::signbit(want)) {
      return false;
    }
    if (std::isfinite(want) && back[i] != halves[i]) return false;
    if (std::isinf(want) && half_value(back[i]) != std::copysign(65504.0, want)) return false;
  }
  return true;
}

bool floats_to_halves(Pool&) {
  std::vector<float> floats = {0.0f, -0.0f, 1e-45f, 3e-8f, 65504.0f, 65519.99f, 65520.0f, 7e4f, 3e38f};
  floats.push_back(std::numeric_limits<float>::infinity());
  floats.push_back(std::numeric_limits<float>::quiet_NaN());
  // Every half, every point half way between two, and the floats next to these.
  for (uint16_t h = 0; h < 0x7c00; ++h) {
    const float at = static_cast<float>(half_value(h));
    const float middle =
        static_cast<float>((half_value(h) + (h == 0x7bff ? 65536 : half_value(h + 1))) / 2);
    for (float x : {at, middle}) {
      floats.insert(floats.end(), {x, std::nextafter(x, 1e9f), std::nextafter(x, -1e9f)});
    }
  }
  std::uniform_int_distribution<uint32_t> any;
  for (int i = 0; i < 300000; ++i) {
    const uint32_t bits = any(rng());
    float x;
    std::memcpy(&x, &bits, sizeof x);
    floats.push_back(x);
  }
  const size_t count = floats.size();
  for (size_t i = 0; i < count; ++i) floats.push_back(-floats[i]);
  std::vector<uint16_t> halves(floats.size());
  active_kernel().float_to_half(floats.data(), halves.data(), floats.size());
  for (size_t i = 0; i < floats.size(); ++i) {
    const double got = half_value(halves[i]), want = nearest_half(floats[i]);
    if (std::isnan(want) ? !std::isnan(got) : got != want || std::signbit(got) != std::signbit(want)) {
      std::printf("  %.9g became %.9g instead of %.9g\n", floats[i], got, want);
      return false;
    }
  }
  return true;
}

// Rows where a rule of quantisation decides, each alone in its head: ties, the largest code, values and
// scales that round to 0 or leave fp16, NaN and infinity.
bool codes(Pool& pool) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> starts = {
      {0.0f, -0.0f},
      {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 126.5f, -126.5f},  // scale 1
      {-127.0f, 0.49999997f, 0.50000006f},
      {1.0f, -1.0f},
      {127 * 1.00048828f, -127 * 1.00048828f},  // the scale rounds down: 127.06 steps
      {1e-6f, -1e-6f, 3e-7f},                   // scale below 2^-24 / 2: 0
      {3.78e-6f, -3.79e-6f},                    // scale next to 2^-25, to even: 0
      {1.135e-5f, -1.1e-5f, 5e-6f},             // a subnormal scale far from the exact one
      {1e-40f, 1e-45f},
      {1e7f, -1e7f, 8.319e6f, 4e6f},  // the scale saturates at 65504
      {3e38f, -3e38f, 1.0f},
      {kInf, -kInf, 1e6f, -1.0f},
      {kNaN, 1.0f, -0.25f},
      {kNaN, kNaN},
      {kNaN, kInf},
  };
  for (int dim : {1, 2, 7, 16, 31, 62, 64, 80, 128}) {
    Problem problem({static_cast<int64_t>(starts.size()), 0, 1, 1, dim}, CacheType::kInt8);
    for (size_t t = 0; t < starts.size(); ++t) {
      float* row = &problem.key[t * dim];
      // The rest of the row within the row's own range, so that whole and partial vectors take part.
      const float least = std::fabs(starts[t].back()) / 4;
      for (int d = 0; d < dim; ++d) row[d] = std::isfinite(least) ? row[d] / 4 * least : 0.0f;
      for (int d = 0; d < std::min<int>(dim, starts[t].size()); ++d) row[dim - 1 - d] = starts[t][d];
    }
    if (!problem.run(1, pool)) return false;
    for (size_t t = 0; t < starts.size(); ++t) {
      if (problem.has_codes(problem.key_cache, t, &problem.key[t * dim])) continue;
      std::printf("  D %d: wrong codes of the row that begins with %g\n", dim, starts[t][0]);
      return false;
    }
    for (size_t i = 0; i < problem.query.size(); ++i) {
      if (!std::isfinite(problem.p.output[i])) return false;
    }
  }
  return true;
}

// Quantisation is the last thing that happens to a row and the first that is undone: the output is that
// of an fp32 cache but for the rounding of the rows. A value is off by up to a 254th of its row's
// largest, which is 3 to 4 of its standard deviations, so by 1 % of one on average, keys as well as
// values; rows that are not turned back, or turned before their codes are undone, are off by all of it.
bool int8_is_near_fp32(Pool& pool) {
  for (Rotary mode : kModes) {
    for (bool separate : {false, true}) {
      for (int64_t tokens : {1, 40}) {
        const Case c = {tokens, 300, 8, 2, 64, mode, mode == Rotary::kNone ? 0 : 64, separate};
        std::vector<float> outputs[2];
        for (CacheType type : {CacheType::kFloat32, CacheType::kInt8}) {
          rng().seed(7);
          Problem problem(c, type);
          if (!problem.run(2, pool)) return false;
          outputs[type == CacheType::kInt8].assign(problem.p.output,
                                                   problem.p.output + problem.query.size());
        }
        double square = 0, difference = 0;
        for (size_t i = 0; i < outputs[0].size(); ++i) {
          square += outputs[0][i] * outputs[0][i];
          difference += std::pow(outputs[0][i] - outputs[1][i], 2);
        }
        if (!(difference > 0 && std::sqrt(difference / square) < 0.03)) {
          std::printf("  rotary %d separate %d: off by %g\n", static_cast<int>(mode), separate,
                      std::sqrt(difference / square));
          return false;
        }
      }
    }
  }
  return true;
}

// Rows and queries that are hard on integers of 16 bits, each against the error that its rounding can
// make: of a score 1.5e-5 max|q| sum|k|, of a value 1.5e-5 of the tile's largest weight * scale a row.
bool int8_adversaries(Pool& pool) {
  const int64_t tokens = 150;
  const int D = 64;
  const auto row = [](std::vector<float>& rows, int64_t n) { return rows.data() + n * 64; };
  const struct {
    const char* name;
    double bound;
    std::function<void(Problem&)> spoil;
  } table[] = {
      {"one value of a query a hundred times the others", 2e-2,
       [&](Problem& a) {
         for (size_t i = 7; i < a.query.size(); i += D) a.query[i] *= 100;
         for (size_t i = 7; i < a.key.size(); i += D) a.key[i] /= 100;
       }},
      {"all rows equal", 1e-4,
       [&](Problem& a) {
         for (int64_t n = 1; n < tokens; ++n) std::copy_n(row(a.key, 0), D, row(a.key, n));
       }},
      {"one row with nearly all the weight", 1e-3,
       [&](Problem& a) {
         for (float& q : a.query) q = 0.5f;
         for (int d = 0; d < D; ++d) row(a.key, 0)[d] = 2.0f;
       }},
      {"a thousandth of the weight in each row but one, all of one sign", 1e-3,
       [&](Problem& a) {
         for (float& q : a.query) q = 1.0f;
         for (size_t i = 0; i < a.key.size(); ++i) a.key[i] = i < 64 ? 1.8638f : 1.0f;
       }},
      {"scales next to the least", 5e-4,
       [&](Problem& a) {
         for (float& k : a.key) k *= 2e-5f;
       }},
      {"scales four orders apart", 5e-4,
       [&](Problem& a) {
         for (size_t i = 0; i < a.key.size(); ++i) a.key[i] *= i / 64 % 3 == 0 ? 1e-4f : 1.0f;
       }},
      {"rows of zeros before any other", 5e-4,
       [&](Problem& a) { std::fill_n(a.key.begin(), a.key.size() * 2 / 3, 0.0f); }},
      {"queries of zeros and of the least numbers", 5e-4,
       [&](Problem& a) {
         for (size_t i = 0; i < a.query.size(); ++i) a.query[i] = i / 64 % 2 ? 0.0f : 1e-44f;
       }},
      {"scores of millions", 5e-4,
       [&](Problem& a) {
         for (float& q : a.query) q = 3e6f;
         for (int64_t n = 0; n < tokens; ++n) {
           for (int d = 0; d < D; ++d)
             row(a.key, n)[d] = static_cast<float>(n % 40) * (d % 2 ? 3.0f : 1.0f);
         }
       }},
  };
  bool good = true;
  for (const auto& adversary : table) {
    Problem problem({tokens, 0, 6, 1, D}, CacheType::kInt8);
    adversary.spoil(problem);
    const double error = problem.run(2, pool) ? problem.error() : INFINITY;
    if (error <= adversary.bound) continue;
    std::printf("  %s: relative error %.3g\n", adversary.name, error);
    good = false;
  }
  return good;
}

// The largest sums that integers can make: all of a query and of a row at their largest, in ever more
// dimensions. A sum that wraps around turns the order of the rows upside down.
bool int8_sums_fit(Pool& pool) {
  for (int dim : {512, 516, 517, 576, 1024, 4096}) {
    Problem problem({40, 0, 6, 1, dim}, CacheType::kInt8);
    std::fill(problem.query.begin(), problem.query.end(), 1.0f);
    for (size_t i = 0; i < problem.key.size(); ++i) problem.key[i] = i / dim % 2 ? 1.0f : 0.9f;
    const double error = problem.run(1, pool) ? problem.error() : INFINITY;
    if (error <= 1e-3) continue;
    std::printf("  D %d: relative error %.3g\n", dim, error);
    return false;
  }
  return true;
}

// A query that is no number makes an output that is none, however it is rounded on its way.
bool nan_queries(Pool& pool) {
  for (CacheType type : kTypes) {
    for (float bad : {NAN, INFINITY}) {
      Problem problem({2, 80, 8, 1, 64}, type);
      problem.query[5] = bad;
      if (!problem.run(1, pool) || !std::isnan(problem.p.output[0])) return false;
      if (!std::isfinite(problem.p.output[64])) return false;
    }
  }
  return true;
}

}  // namespace edge_qkv
