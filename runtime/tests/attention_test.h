// What the files of attention_test share.
#pragma once

#include "attention_problem.h"

namespace edge_qkv {

constexpr CacheType kTypes[] = {CacheType::kFloat32, CacheType::kFloat16, CacheType::kInt8};
constexpr Rotary kModes[] = {Rotary::kNone, Rotary::kConjugate, Rotary::kOnRead};

// In attention_rounding_test.cpp: how numbers are rounded.
bool halves_to_floats(Pool&);
bool floats_to_halves(Pool&);
bool codes(Pool& pool);
bool int8_is_near_fp32(Pool& pool);
bool int8_adversaries(Pool& pool);
bool int8_sums_fit(Pool& pool);
bool nan_queries(Pool& pool);

}  // namespace edge_qkv
