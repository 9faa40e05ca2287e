#include "model_file.h"

#include "core/description.h"
#include "pte_file.h"

namespace edge_qkv::et {
namespace {

constexpr int64_t kOperator = 1;

}  // namespace

ModelDescription describe_pte(const std::string& path) {
  const PteFile file = read_pte_file(path);
  const Metadata metadata(file.metadata, path);
  ModelDescription model = describe(metadata, "executorch", file.bytes);
  metadata.check_version("operator", kOperator);
  model.info.cache_rows = metadata.number("cache_rows", int64_t{1} << 31, model.info.max_positions);
  model.info.prefill_chunk = metadata.number("prefill_chunk", kMostChunk);
  return model;
}

}  // namespace edge_qkv::et
