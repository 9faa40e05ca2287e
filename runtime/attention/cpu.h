// Which instruction set the kernel uses on this processor.
#pragma once

#include "kernel.h"

namespace edge_qkv {

// The kernel in use, chosen once, at the first call of this, isa_name or isa_error.
const Kernel& active_kernel();

}  // namespace edge_qkv
