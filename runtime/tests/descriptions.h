// Descriptions of models of every shape, as exports write them.
#pragma once

#include <string>

namespace edge_qkv::test {

inline std::string all_layers(const std::string& cache = "fp16") {
  return "format 3\nvocab_size 260\nmax_positions 96\nwidth 32\ncache " + cache +
         "\nlearned_positions 0\nweight_bits 4\nblock_size 32\nmatrix_bytes 1000\ntable_bytes 2000\n"
         "prefill_chunk 0\ncache_rows 0\noperator 2\n";
}

inline std::string kind_of_layer(const std::string& name, const std::string& rows = "unified",
                                 int64_t window = 0, int64_t head_dim = 8, int64_t value_dim = 8,
                                 int64_t kv_heads = 1) {
  return "kind " + name + "\nheads 4\nkv_heads " + std::to_string(kv_heads) + "\nhead_dim " +
         std::to_string(head_dim) + "\nvalue_dim " + std::to_string(value_dim) + "\nrows " + rows +
         "\nwindow " + std::to_string(window) + "\nsinks " + (window > 0 ? "2" : "0") +
         "\npositions rotary-conjugate\nrotary_offset 0\nfrequencies 1 0.1 0.01 1e-3\n"
         "mlp_width 48\nmlp_matrices 3\n";
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  return at == std::string::npos ? "nothing to replace" : text.replace(at, from.size(), to);
}

inline std::string uniform(const std::string& cache = "fp16") {
  return all_layers(cache) + kind_of_layer("layer") + "pattern layer layer\n";
}

// Five layers with a window for each that sees everything.
inline std::string local_and_global(const std::string& cache = "fp16") {
  return all_layers(cache) + kind_of_layer("local", "unified", 16) +
         kind_of_layer("global", "unified", 0, 16, 16, 2) +
         "pattern local local local local local global\n";
}

// A latent row whose last values are rotated and no part of the value.
inline std::string latent(const std::string& cache = "fp16") {
  return all_layers(cache) +
         replaced(kind_of_layer("latent", "unified", 0, 20, 12), "rotary_offset 0", "rotary_offset 12") +
         "pattern latent latent\n";
}

// Layers that read the rows of earlier ones, further than those themselves see, beside a key and a value
// of their own.
inline std::string shared_rows(const std::string& cache = "fp16") {
  return all_layers(cache) + kind_of_layer("own", "unified", 16) +
         kind_of_layer("reader", "of own", 24) + kind_of_layer("apart", "separate", 0, 8, 12) +
         kind_of_layer("apart_reader", "of apart", 0, 8, 12) +
         "pattern own apart own reader apart_reader reader\n";
}

}  // namespace edge_qkv::test
