// Chooses the next token from logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edge_qkv {

struct SamplerOptions {
  float temperature = 0.0f;  // 0 is greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  float repetition_penalty = 1.0f;
  int32_t repetition_window = 0;  // tokens; 0: all
  uint64_t seed = 0;
};

// The filters in their order, which is that of Hugging Face's transformers:
//   1. repetition_penalty: logits of the tokens in the window are divided by it where they are positive,
//      multiplied where they are negative (Keskar et al., arXiv 1909.05858), once however often they
//      occur;
//   2. temperature: logits are divided by it; at 0 the largest logit wins, the lowest token among
//   equals;
//   3. top_k: the k most likely tokens stay;
//   4. top_p: the fewest of these, most likely first, that hold p of their probability stay;
//   5. min_p: of these, the ones at least min_p as likely as the most likely stay.
// A choice is a pure function of options, logits and history: the random number
// is drawn from the seed and the length of the history, so that a session that
// was rewound or restored goes on as it would have. The arithmetic is the same
// on every platform. NaN counts as -infinity, +infinity as the largest float.
class Sampler {
 public:
  // Throws Error where an option is out of its range.
  explicit Sampler(const SamplerOptions& options = {});

  // logits [vocab_size]; history: all tokens so far, each in [0, vocab_size). Throws Error where no
  // token can be chosen.
  int32_t sample(const float* logits, size_t vocab_size, const std::vector<int32_t>& history);

 private:
  struct Candidate {
    float logit;
    int32_t token;
    double weight;  // probability relative to the most likely token
  };

  void collect(const float* logits, size_t vocab_size, const std::vector<int32_t>& history);
  void weigh();
  void keep_likely();

  SamplerOptions options_;
  std::vector<Candidate> candidates_;
  std::vector<bool> seen_;  // [vocab_size], all false between calls
};

}  // namespace edge_qkv
