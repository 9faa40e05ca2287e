// The ExecuTorch engine: programs exported with our operator, evaluated by libedge_qkv_executorch.
#pragma once

#include <memory>
#include <string>

#include "engines/engines.h"

namespace edge_qkv::et {

// Opens the program at `path`. Throws Error.
std::unique_ptr<EngineModel> open_pte(const std::string& path, const EngineOptions& options);

// Writes the weights of the program at `path` as XNNPACK keeps them into options.packed_weights, see
// engines/packed.h. Throws Error.
void pack_pte(const std::string& path, const EngineOptions& options);

// Whether they are there.
bool is_packed(const std::string& path, const EngineOptions& options);

}  // namespace edge_qkv::et
