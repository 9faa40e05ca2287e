// The sampler's filters, one at a time and in their order.
#include "core/sampler.h"

#include <cmath>
#include <limits>
#include <map>

#include "test.h"

using namespace edge_qkv;

namespace {

// Of 1000 equally likely tokens, seed 42, histories of 0 to 3 tokens.
constexpr int32_t kFirst[] = {343, 950, 446, 977};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Logits of these probabilities.
std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p)));
  return logits;
}

int32_t sample(const SamplerOptions& options, const std::vector<float>& logits,
               const std::vector<int32_t>& history = {}) {
  return Sampler(options).sample(logits.data(), logits.size(), history);
}

SamplerOptions random_options() {
  SamplerOptions options;
  options.temperature = 1;
  return options;
}

// How often each token is chosen, over many seeds.
std::map<int32_t, double> frequencies(SamplerOptions options, const std::vector<float>& logits,
                                      const std::vector<int32_t>& history = {}) {
  constexpr int kDraws = 40000;
  std::map<int32_t, double> found;
  for (int seed = 0; seed < kDraws; ++seed) {
    options.seed = static_cast<uint64_t>(seed);
    found[sample(options, logits, history)] += 1.0 / kDraws;
  }
  return found;
}

bool near(double a, double b) { return std::abs(a - b) < 0.01; }

}  // namespace

TEST(greedy, "greedy takes the largest logit, the first among equals") {
  EXPECT(sample({}, {1, 5, 2, 5}) == 1);
  EXPECT(sample({}, {-3, -2, -9}) == 1);
}

TEST(draws, "tokens are drawn by their probability") {
  const auto found = frequencies(random_options(), logits_of({0.5, 0.1, 0.4}));
  EXPECT(near(found.at(0), 0.5) && near(found.at(1), 0.1) && near(found.at(2), 0.4));
}

TEST(temperature, "temperature sharpens and flattens") {
  SamplerOptions options = random_options();
  options.temperature = 0.5f;  // squares the probabilities
  EXPECT(near(frequencies(options, logits_of({0.8, 0.2})).at(0), 0.64 / 0.68));
  options.temperature = 1e-30f;
  EXPECT(frequencies(options, {1, 3, 2}).at(1) == frequencies(options, {1, 3, 2}).begin()->second);
  options.temperature = 1e30f;
  EXPECT(near(frequencies(options, {1, 3, 2, -7}).at(3), 0.25));
}

TEST(top_k, "top_k keeps the k most likely") {
  SamplerOptions options = random_options();
  options.top_k = 2;
  const auto found = frequencies(options, logits_of({0.2, 0.4, 0.1, 0.3}));
  EXPECT(found.size() == 2 && near(found.at(1), 4.0 / 7) && near(found.at(3), 3.0 / 7));
  options.top_k = 1000;
  EXPECT(frequencies(options, logits_of({0.2, 0.4, 0.1, 0.3})).size() == 4);
}

TEST(top_k_ties, "among equals top_k keeps the lowest tokens") {
  SamplerOptions options = random_options();
  options.top_k = 2;
  const auto found = frequencies(options, {1, 1, 1, 1, 0});
  EXPECT(found.size() == 2 && found.count(0) && found.count(1));
}

TEST(top_p, "top_p keeps the fewest tokens that hold p") {
  SamplerOptions options = random_options();
  options.top_p = 0.65f;
  const auto found = frequencies(options, logits_of({0.1, 0.4, 0.2, 0.3}));
  EXPECT(found.size() == 2 && near(found.at(1), 4.0 / 7) && near(found.at(3), 3.0 / 7));
  options.top_p = 1e-6f;
  EXPECT(frequencies(options, logits_of({0.1, 0.4, 0.2, 0.3})).size() == 1);
}

TEST(top_p_after_top_k, "top_p counts the probability that top_k left") {
  SamplerOptions options = random_options();
  options.top_k = 2;
  options.top_p = 0.5f;  // 0.4 of 0.7 is enough, of 1 it would not be
  const auto found = frequencies(options, logits_of({0.1, 0.4, 0.2, 0.3}));
  EXPECT(found.size() == 1 && found.count(1));
}

TEST(min_p, "min_p keeps tokens relative to the most likely") {
  SamplerOptions options = random_options();
  options.min_p = 0.5f;
  const auto found = frequencies(options, logits_of({0.1, 0.45, 0.18, 0.27}));
  EXPECT(found.size() == 2 && found.count(1) && found.count(3));
  options.min_p = 1;
  EXPECT(frequencies(options, logits_of({0.1, 0.45, 0.18, 0.27})).size() == 1);
}

TEST(repetition, "repetition_penalty makes seen tokens less likely, once each, within the window") {
  SamplerOptions options;
  options.repetition_penalty = 2;
  EXPECT(sample(options, {3, 4, 1}, {1}) == 0);
  EXPECT(sample(options, {-3, -2, -9}, {1, 1, 1}) == 0);
  EXPECT(sample(options, {1, 4, 1.9f}, {1, 1, 1}) == 1);  // 4 / 2, not 4 / 8
  options.repetition_window = 2;
  EXPECT(sample(options, {3, 4, 1}, {1, 2, 2}) == 1);
  EXPECT(sample(options, {3, 4, 1}, {2, 1, 2}) == 0);
}

TEST(pure, "a choice depends on seed and length of the history alone") {
  SamplerOptions options = random_options();
  const std::vector<float> logits(1000, 0.0f);
  options.seed = 42;
  Sampler sampler(options);
  std::vector<int32_t> history, first, again;
  for (int i = 0; i < 20; ++i) {
    first.push_back(sampler.sample(logits.data(), logits.size(), history));
    history.push_back(first.back());
  }
  for (size_t i = 0; i < 20; ++i) {
    again.push_back(sample(options, logits, std::vector<int32_t>(first.begin(), first.begin() + i)));
  }
  EXPECT(first == again);
  // The same on every platform; whoever changes these numbers changes what users' seeds give.
  EXPECT(first[0] == kFirst[0] && first[1] == kFirst[1] && first[2] == kFirst[2] &&
         first[3] == kFirst[3]);
  options.seed = 43;
  EXPECT(sample(options, logits) != first[0]);
}

TEST(not_numbers, "NaN is never chosen, infinity counts as the largest float") {
  EXPECT(sample({}, {kNan, 1, kNan, 2}) == 3);
  EXPECT(sample({}, {1, kInfinity, 2, kInfinity}) == 1);
  SamplerOptions options = random_options();
  for (const int32_t top_k : {0, 3}) {
    options.top_k = top_k;
    const auto found = frequencies(options, {kNan, 1, -kInfinity, 1, kNan});
    EXPECT(found.size() == 2 && found.count(1) && found.count(3));
    EXPECT(frequencies(options, {kNan, kInfinity, 2}).size() == 1);
    EXPECT_ERROR(EQKV_ENGINE_FAILED, "NaN", sample(options, {kNan, -kInfinity}));
  }
  EXPECT_ERROR(EQKV_ENGINE_FAILED, "NaN", sample({}, {kNan}));
}

TEST(extremes, "the largest and smallest floats do no harm") {
  constexpr float kMax = std::numeric_limits<float>::max();
  SamplerOptions options = random_options();
  options.temperature = std::numeric_limits<float>::denorm_min();
  options.repetition_penalty = kMax;
  options.top_p = 0.9f;
  EXPECT(sample(options, {kMax, -kMax, 0}, {1, 2}) == 0);
  options.repetition_penalty = 1 / kMax;
  EXPECT(sample(options, {1, -kMax, 2}, {1, 2}) == 2);
}

TEST(ranges, "options out of range are refused by name") {
  const auto refused = [](const char* name, auto field, auto... values) {
    for (const auto value : {values...}) {
      SamplerOptions options;
      options.*field = value;
      EXPECT_ERROR(EQKV_INVALID_ARGUMENT, name, Sampler{options});
    }
  };
  refused("temperature", &SamplerOptions::temperature, -1.0f, kNan, kInfinity);
  refused("top_k", &SamplerOptions::top_k, -1);
  refused("top_p", &SamplerOptions::top_p, 0.0f, 1.1f, kNan);
  refused("min_p", &SamplerOptions::min_p, -0.1f, 1.1f, kNan);
  refused("repetition_penalty", &SamplerOptions::repetition_penalty, 0.0f, -1.0f, kNan, kInfinity);
  refused("repetition_window", &SamplerOptions::repetition_window, -1);
}
