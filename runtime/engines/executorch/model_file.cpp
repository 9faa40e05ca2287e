#include "model_file.h"

#include "core/error.h"
#include "pte_file.h"

namespace edge_qkv::et {

ModelInfo describe_pte(const std::string& path) {
  const ModelInfo info = model_info(read_pte_file(path), path, "executorch");
  // A program has tensors of one size, and its inputs have a largest one.
  if (info.description.cache_rows == 0 || info.description.prefill_chunk == 0) {
    throw Error(EQKV_BAD_PACKAGE, path +
                                      ": its description has no cache_rows or no prefill_chunk, which "
                                      "a program fixes; export the model again.");
  }
  return info;
}

}  // namespace edge_qkv::et
