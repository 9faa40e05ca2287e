// An ExecuTorch program, checked to be a model of ours: everything about it comes from outside.
#pragma once

#include <string>

#include "core/engine.h"

namespace edge_qkv::et {

// Reads and checks the metadata of the file at `path`. Throws Error with EQKV_BAD_PACKAGE.
ModelInfo describe_pte(const std::string& path);

}  // namespace edge_qkv::et
