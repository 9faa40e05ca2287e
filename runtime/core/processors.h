// How many processors a process may use at once.
#pragma once

#include <string>

namespace edge_qkv {

// The processors of this thread's affinity mask, or as many as the CPU quotas of its control groups pay
// for where these are fewer; at least 1. Part of a processor counts as one: with a quota of 1.5 two
// threads do 1.5 times the work of one, though both wait together for the next period.
int processors();

// The least CPU quota, in processors, of this process's control groups and the groups above them
// (cpu.max of version 2, cpu.cfs_quota_us of version 1); 0: none. root: what comes before the paths of
// /proc and of the mounts, for tests.
double cpu_quota(const std::string& root = "");

}  // namespace edge_qkv
