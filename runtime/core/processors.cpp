#include "processors.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace edge_qkv {
namespace {

// Whether a list such as "cpu,cpuacct" has the word.
bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// This process's group in the hierarchy of version 2, or in the one of version 1 that has the CPU
// controller; empty: none. Lines of /proc/self/cgroup are "number:controllers:group"; version 2 has no
// controllers there.
std::string own_group(const std::string& root, bool version_2) {
  std::ifstream lines(root + "/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version_2 ? line.rfind("0::", 0) == 0 : has_word(controllers, "cpu"))
      return line.substr(second + 1);
  }
  return "";
}

// The quota of one group in processors; 0: none.
double group_quota(const std::string& directory, bool version_2) {
  double quota = 0, period = 0;
  if (version_2) {
    std::ifstream file(directory + "/cpu.max");  // "150000 100000", or "max 100000"
    file >> quota >> period;
  } else {
    std::ifstream(directory + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(directory + "/cpu.cfs_period_us") >> period;
  }
  return quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

double cpu_quota(const std::string& root) {
  double least = 0;
  // "id parent device root mount-point options [fields] - type source options"
  std::ifstream mounts(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::string skipped, top, mount, type, options;
    std::istringstream(line) >> skipped >> skipped >> skipped >> top >> mount;
    std::istringstream(line.substr(dash + 3)) >> type >> skipped >> options;
    const bool version_2 = type == "cgroup2";
    if (!version_2 && (type != "cgroup" || !has_word(options, "cpu"))) continue;
    std::string group = own_group(root, version_2);
    if (group.empty()) continue;
    // A container sees the mount from its own group on,
    // while the group may be named from the host's root.
    if (top != "/" && group.rfind(top, 0) == 0) group.erase(0, top.size());
    if (group.find("..") != std::string::npos)
      group.clear();  // above the mount: only what is mounted is seen
    for (;;) {
      const double quota = group_quota(root + mount + group, version_2);
      if (quota > 0 && (least == 0 || quota < least)) least = quota;
      if (group.empty()) break;
      group.erase(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
  }
  return least;
}

int processors() {
  int count = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) count = CPU_COUNT(&allowed);
#endif
  const double quota = cpu_quota();
  if (quota > 0 && quota < count) count = static_cast<int>(std::ceil(quota));
  return std::max(count, 1);
}

}  // namespace edge_qkv
