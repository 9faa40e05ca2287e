// The processors a process may use: control groups in trees of files, and this process's affinity.
#include "core/processors.h"

#include <sched.h>

#include <filesystem>

#include "engines/engines.h"
#include "temporary.h"
#include "test.h"

namespace edge_qkv::test {
namespace {

constexpr char kVersion2[] = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
constexpr char kVersion1[] =
    "25 23 0:22 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
    "26 23 0:23 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n";

struct File {
  const char* path;
  const char* content;
};

// The quota in a tree that has these files.
double quota(const std::string& groups, const std::string& mounts, const std::vector<File>& files) {
  TemporaryDirectory root;
  const auto write = [&](const std::string& path, const std::string& content) {
    std::filesystem::create_directories(std::filesystem::path(root / path).parent_path());
    write_file(root / path, content);
  };
  write("proc/self/cgroup", groups);
  write("proc/self/mountinfo", mounts);
  for (const File& file : files) write(std::string("sys/fs/cgroup/") + file.path, file.content);
  return cpu_quota(root.path());
}

TEST(version_2_quota, "a quota of version 2 is the least of the group's and those above it") {
  const std::string groups = "0::/a/b/c\n";
  EXPECT(quota(groups, kVersion2, {}) == 0);
  EXPECT(quota(groups, kVersion2, {{"a/b/c/cpu.max", "max 100000\n"}}) == 0);
  EXPECT(quota(groups, kVersion2, {{"a/b/c/cpu.max", "150000 100000\n"}}) == 1.5);
  EXPECT(quota(groups, kVersion2,
               {{"a/cpu.max", "50000 100000\n"}, {"a/b/c/cpu.max", "max 100000\n"}}) == 0.5);
  EXPECT(quota(groups, kVersion2,
               {{"a/b/cpu.max", "300000 100000\n"}, {"a/b/c/cpu.max", "50000 25000\n"}}) == 2);
  EXPECT(quota(groups, kVersion2, {{"cpu.max", "400000 100000\n"}}) == 4);
  EXPECT(quota(groups, kVersion2, {{"a/bb/cpu.max", "100000 100000\n"}}) == 0);  // not above it
}

TEST(container_quota, "a container's own root is the mount, however its group is named") {
  EXPECT(quota("0::/\n", kVersion2, {{"cpu.max", "200000 100000\n"}}) == 2);
  EXPECT(quota("0::/../x\n", kVersion2, {{"cpu.max", "200000 100000\n"}}) == 2);
  const std::string mounts = "26 23 0:23 /docker/f00 /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
  const std::vector<File> files = {{"cpu/cpu.cfs_quota_us", "250000\n"},
                                   {"cpu/cpu.cfs_period_us", "100000\n"}};
  EXPECT(quota("3:cpu:/docker/f00\n", mounts, files) == 2.5);
  EXPECT(quota("3:cpu:/docker/f00/inner\n", mounts, files) == 2.5);
}

TEST(version_1_quota, "a quota of version 1 is of the CPU controller's hierarchy alone") {
  const std::string groups = "5:memory:/a/b\n4:cpu,cpuacct:/a\n3:cpuset:/c\n0::/\n";
  const File period = {"cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"};
  EXPECT(quota(groups, kVersion1, {period, {"cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n"}}) == 0);
  EXPECT(quota(groups, kVersion1, {period, {"cpu,cpuacct/a/cpu.cfs_quota_us", "120000\n"}}) == 1.2);
  EXPECT(quota(groups, kVersion1, {{"cpu,cpuacct/a/cpu.cfs_quota_us", "120000\n"}}) == 0);  // no period
  EXPECT(quota("0::/a\n", kVersion1, {period, {"cpu,cpuacct/a/cpu.cfs_quota_us", "120000\n"}}) == 0);
}

TEST(damaged_quota, "files that are no quota are none") {
  for (const char* content :
       {"", "max", "0 100000", "100000 0", "-5 100000", "x y", "100000", "nan 1"}) {
    EXPECT(quota("0::/a\n", kVersion2, {{"a/cpu.max", content}}) == 0);
  }
  EXPECT(quota("", kVersion2, {{"cpu.max", "100000 100000"}}) == 0);
  for (const char* groups : {"0::a", "0::", "::", ":", "0::/a/../..//"}) quota(groups, kVersion2, {});
  quota("0::/a\n", "26 - cgroup2\n - \n26 23 0:23 / - cgroup2\n", {});
  EXPECT(cpu_quota("/nowhere") == 0);
}

TEST(affinity_threads, "one thread for each processor of the affinity mask") {
  cpu_set_t before, one;
  EXPECT(sched_getaffinity(0, sizeof before, &before) == 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  EXPECT(processors() >= 1 && processors() <= CPU_COUNT(&before));
  EXPECT(sched_setaffinity(0, sizeof one, &one) == 0);
  EXPECT(processors() == 1 && resolved_threads(0) == 1 && resolved_threads(3) == 3);
  EXPECT(sched_setaffinity(0, sizeof before, &before) == 0);
}

}  // namespace
}  // namespace edge_qkv::test
