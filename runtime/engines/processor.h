// Which processor this is, as far as an engine may choose its kernels by it.
#pragma once

#include <string>

namespace edge_qkv {

// One line of printable text, the same on every start on the same machine. Weights that were packed on
// another processor may be laid out otherwise.
std::string processor_name();

}  // namespace edge_qkv
