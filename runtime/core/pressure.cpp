#include "pressure.h"

#include "error.h"

#if defined(__linux__)

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

namespace edge_qkv {
namespace {

// Wake when tasks waited for memory 150 ms in 2 s: what a user notices. An unprivileged process may
// only ask for windows of whole 2 s (Documentation/accounting/psi.rst).
constexpr char kTrigger[] = "some 150000 2000000";
// A second event so soon after the first says that the first answer was not enough.
constexpr std::chrono::seconds kSoon(10);
constexpr int kPollMilliseconds = 1000;
// Of the group's limit, from where on to react before the kernel does.
constexpr double kNear = 0.90, kVeryNear = 0.97;

// The number in a control file; false where there is none ("max", or no such file).
bool read_number(const std::string& path, double* number) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *number);
}

bool is_directory_with(const std::string& directory, const char* file) {
  return access((directory + "/" + file).c_str(), R_OK) == 0;
}

// The directory of this process's own group with a memory controller; empty: none.
std::string own_group() {
  std::string line, path, mount;
  for (std::ifstream groups("/proc/self/cgroup"); std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  for (std::ifstream mounts("/proc/self/mounts"); std::getline(mounts, line);) {
    char where[4096] = "", type[64] = "";
    if (std::sscanf(line.c_str(), "%*s %4095s %63s", where, type) == 2 &&
        std::strcmp(type, "cgroup2") == 0) {
      mount = where;
      break;
    }
  }
  if (path.empty() || mount.empty()) return "";
  const std::string group = path == "/" ? mount : mount + path;
  return is_directory_with(group, "memory.current") ? group : "";
}

int open_trigger(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return -1;
  if (write(file, kTrigger, sizeof kTrigger) == static_cast<ssize_t>(sizeof kTrigger)) return file;
  close(file);
  return -1;
}

}  // namespace

PressureWatch::PressureWatch(const std::string& cgroup, std::function<void(Level)> react)
    : react_(std::move(react)), group_(cgroup.empty() ? own_group() : cgroup) {
  pressure_ = open_trigger(group_.empty() ? "/proc/pressure/memory" : group_ + "/memory.pressure");
  if (pressure_ < 0 && (group_.empty() || !is_directory_with(group_, "memory.current"))) {
    throw Error(EQKV_INVALID_ARGUMENT,
                cgroup.empty() ? "This system tells no memory pressure: it has neither a control group "
                                 "of version 2 with a memory controller nor /proc/pressure/memory."
                               : cgroup +
                                     ": is not the directory of a control group of version 2 with "
                                     "memory.pressure or memory.current that can be read.");
  }
  if (pipe2(stop_, O_CLOEXEC) != 0) {
    if (pressure_ >= 0) close(pressure_);
    throw Error(EQKV_OUT_OF_MEMORY, "The system has no file descriptor left to watch memory pressure.");
  }
  owner_ = getpid();
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (...) {
    if (pressure_ >= 0) close(pressure_);
    close(stop_[0]);
    close(stop_[1]);
    throw Error(EQKV_OUT_OF_MEMORY, "The system has no thread left to watch memory pressure.");
  }
}

PressureWatch::~PressureWatch() {
  if (getpid() == owner_) {
    // A byte, not a closed end: a process that was forked meanwhile may hold the other end open.
    while (write(stop_[1], "", 1) < 0 && errno == EINTR) {
    }
    thread_.join();
  } else {
    thread_.detach();  // in a forked process there is no such thread
  }
  close(stop_[1]);
  close(stop_[0]);
  if (pressure_ >= 0) close(pressure_);
}

bool PressureWatch::near_limit(Level* level) const {
  double used = 0, limit = 0, most = 0;
  if (group_.empty() || !read_number(group_ + "/memory.current", &used)) return false;
  const bool high = read_number(group_ + "/memory.high", &limit);
  const bool max = read_number(group_ + "/memory.max", &most);
  if (!high && !max) return false;
  if (!high || (max && most < limit)) limit = most;
  *level = used >= kVeryNear * limit ? Level::kCritical : Level::kSome;
  return used >= kNear * limit;
}

void PressureWatch::watch() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point last = Clock::now() - 2 * kSoon;
  int was_near = 0;  // 0: not near the limit, 1: near, 2: very near
  for (;;) {
    pollfd files[] = {{stop_[0], POLLIN, 0}, {pressure_, POLLPRI, 0}};  // a file of -1 is left out
    if (poll(files, 2, kPollMilliseconds) < 0) continue;                // interrupted by a signal
    if (files[0].revents) return;
    if (files[1].revents & POLLERR) {  // the group is gone
      close(pressure_);
      pressure_ = -1;
    }
    Level level = Level::kSome;
    const bool stalled = files[1].revents & POLLPRI;
    const int near = near_limit(&level) ? (level == Level::kCritical ? 2 : 1) : 0;
    if (stalled && Clock::now() - last < kSoon) level = Level::kCritical;
    // A limit once for each time that it comes nearer: what could be given then was given.
    if (stalled || near > was_near) {
      last = Clock::now();
      react_(level);
    }
    was_near = near;
  }
}

}  // namespace edge_qkv

#else

namespace edge_qkv {

PressureWatch::PressureWatch(const std::string&, std::function<void(Level)>) {
  throw Error(EQKV_INVALID_ARGUMENT,
              "Memory pressure is watched on Linux only; call the trim function.");
}
PressureWatch::~PressureWatch() = default;
bool PressureWatch::near_limit(Level*) const { return false; }
void PressureWatch::watch() {}

}  // namespace edge_qkv

#endif
