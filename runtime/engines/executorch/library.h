// libedge_qkv_executorch, opened at run time: it stands beside this library, and need not be there.
#pragma once

#include <string>

#include "plugin.h"

namespace edge_qkv::et {

// The library at `path`; or else, unless it is empty, that in the environment variable
// EDGE_QKV_EXECUTORCH_LIBRARY; or else the one beside this library. Stays open until the process ends.
// Throws Error with EQKV_ENGINE_MISSING.
const Plugin& open_plugin(const std::string& path);

}  // namespace edge_qkv::et
