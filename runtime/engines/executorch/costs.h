// What ExecuTorch needs of memory: the figures of the plan that are its own.
#pragma once

#include "core/plan.h"

namespace edge_qkv::et {

extern const PlanEngine kPlanEngine;

// Bytes on the disk of a model's packed weights.
uint64_t packed_file_bytes(const Description& model);

}  // namespace edge_qkv::et
