// Compiled without fused multiply-adds (see CMakeLists.txt): a choice must not depend on the processor.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "error.h"
#include "random.h"

namespace edge_qkv {
namespace {

// e^x for x <= 0, from IEEE operations alone: the mathematical libraries of two platforms differ in the
// last digit. Relative error below 1e-15.
double exp_nonpositive(double x) {
  if (!(x > -700.0)) return 0.0;
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts so that r is exact to its last digits.
  const int n = static_cast<int>(x * 1.4426950408889634 - 0.5);
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double sum = 1.0;
  for (int i = 14; i >= 1; --i) sum = 1.0 + sum * r / i;
  const uint64_t power_bits = static_cast<uint64_t>(1023 + n) << 52;
  double power;
  std::memcpy(&power, &power_bits, sizeof power);
  return sum * power;
}

void require(bool sound, const char* option, const char* range) {
  if (!sound) {
    throw Error(EQKV_INVALID_ARGUMENT,
                std::string("The sampler's ") + option + " must be " + range + ".");
  }
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  // Written so that NaN fails.
  require(options.temperature >= 0 && std::isfinite(options.temperature), "temperature",
          "0 (greedy) or more, and finite");
  require(options.top_k >= 0, "top_k", "0 (off) or more");
  require(options.top_p > 0 && options.top_p <= 1, "top_p", "above 0 and at most 1 (off)");
  require(options.min_p >= 0 && options.min_p <= 1, "min_p", "from 0 (off) to 1");
  require(options.repetition_penalty > 0 && std::isfinite(options.repetition_penalty),
          "repetition_penalty", "above 0 and finite; 1 is off");
  require(options.repetition_window >= 0, "repetition_window", "0 (the whole session) or more");
}

int32_t Sampler::sample(const float* logits, size_t vocab_size, const std::vector<int32_t>& history) {
  collect(logits, vocab_size, history);
  const auto less_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
  };
  if (options_.temperature == 0) {
    return std::max_element(candidates_.begin(), candidates_.end(), less_likely)->token;
  }
  weigh();
  if (options_.top_k > 0 || options_.top_p < 1 || options_.min_p > 0) keep_likely();

  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  const double threshold = total * unit_interval(scramble(scramble(options_.seed) ^ history.size()));
  double sum = 0;
  int32_t chosen = -1;
  for (const Candidate& c : candidates_) {
    if (c.weight == 0) continue;
    chosen = c.token;  // the last one, should rounding keep the sum from passing the threshold
    sum += c.weight;
    if (sum > threshold) break;
  }
  return chosen;
}

// The tokens that can be chosen at all, with their penalised logits.
void Sampler::collect(const float* logits, size_t vocab_size, const std::vector<int32_t>& history) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  if (seen_.size() != vocab_size) seen_.assign(vocab_size, false);
  const size_t window =
      options_.repetition_window > 0 ? static_cast<size_t>(options_.repetition_window) : history.size();
  const auto recent = history.end() - static_cast<ptrdiff_t>(std::min(window, history.size()));
  const bool penalise = options_.repetition_penalty != 1;
  if (penalise) {
    for (auto token = recent; token != history.end(); ++token) seen_[static_cast<size_t>(*token)] = true;
  }
  candidates_.clear();
  for (size_t i = 0; i < vocab_size; ++i) {
    float logit = logits[i];
    if (!(logit >= -kLargest)) continue;  // NaN or -infinity
    if (seen_[i]) {
      logit = logit > 0 ? logit / options_.repetition_penalty : logit * options_.repetition_penalty;
    }
    candidates_.push_back({std::clamp(logit, -kLargest, kLargest), static_cast<int32_t>(i), 0.0});
  }
  if (penalise) {
    for (auto token = recent; token != history.end(); ++token)
      seen_[static_cast<size_t>(*token)] = false;
  }
  if (candidates_.empty()) {
    throw Error(EQKV_ENGINE_FAILED,
                "The model's logits are all NaN or -infinity; no token can be chosen.");
  }
}

void Sampler::weigh() {
  double largest = candidates_[0].logit;
  for (const Candidate& c : candidates_) largest = std::max<double>(largest, c.logit);
  for (Candidate& c : candidates_)
    c.weight = exp_nonpositive((c.logit - largest) / options_.temperature);
}

// top_k, top_p and min_p. A heap gives the most likely first, and only as far as they are needed: no
// sort of the whole vocabulary.
void Sampler::keep_likely() {
  const auto less_likely = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
  };
  const size_t count = candidates_.size();
  const bool limited = options_.top_k > 0 && static_cast<size_t>(options_.top_k) < count;
  const size_t top_k = limited ? static_cast<size_t>(options_.top_k) : count;
  if (limited) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<ptrdiff_t>(top_k - 1),
                     candidates_.end(),
                     [&](const Candidate& a, const Candidate& b) { return less_likely(b, a); });
    candidates_.resize(top_k);
  }
  std::make_heap(candidates_.begin(), candidates_.end(), less_likely);
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;

  double sum = 0;
  auto end = candidates_.end();
  while (end != candidates_.begin()) {
    if (candidates_.front().weight < options_.min_p) break;
    if (options_.top_p < 1 && sum >= options_.top_p * total) break;
    sum += candidates_.front().weight;
    std::pop_heap(candidates_.begin(), end--, less_likely);
  }
  // Taken from the heap, they lie at the end, the most likely last.
  candidates_.erase(candidates_.begin(), end);
  std::reverse(candidates_.begin(), candidates_.end());
}

}  // namespace edge_qkv
