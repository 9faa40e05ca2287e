// A session in a file: snapshot.md describes the format.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache.h"
#include "engine.h"
#include "rows_file.h"

namespace edge_qkv {

struct Snapshot {
  std::vector<int32_t> tokens;           // [T]
  std::vector<float> logits;             // [vocab_size], or empty: none were saved
  std::shared_ptr<const RowsFile> rows;  // the live ones of T of each slab
  std::vector<int64_t> first_live;       // [tensors], as in CacheMemory
};

// Writes the live ones of the first tokens.size() rows of `cache` with their tokens and the logits that
// follow them [vocab_size], or null, to the file `path`, which is replaced only when all is on the disk.
// Slabs start at multiples of `alignment`: a system with larger pages reads them instead of mapping
// them. Throws Error; what `path` held before is then still there.
void save_snapshot(const std::string& path, const ModelInfo& model, const CacheMemory& cache,
                   const std::vector<int32_t>& tokens, const float* logits,
                   uint64_t alignment = page_bytes());

// Reads and checks all of the file but for what rows mean, with a buffer that does not grow with it.
// Throws Error: EQKV_CONTEXT_FULL where it holds more than `context` tokens, else EQKV_BAD_SNAPSHOT.
Snapshot open_snapshot(const std::string& path, const ModelInfo& model, int64_t context);

}  // namespace edge_qkv
