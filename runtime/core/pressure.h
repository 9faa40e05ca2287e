// Linux: notices that memory gets short, from the kernel's pressure stall information (PSI) and from
// the limits of a control group.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace edge_qkv {

class PressureWatch {
 public:
  // How short memory is: some tasks wait for it, or it is about to run out.
  enum class Level { kSome, kCritical };

  // Watches the control group (version 2) of this directory until destroyed, and calls `react` from a
  // thread of its own; empty: the process's own group, or else the whole system. Throws Error where
  // there is nothing to watch.
  PressureWatch(const std::string& cgroup, std::function<void(Level)> react);
  ~PressureWatch();
  PressureWatch(const PressureWatch&) = delete;
  PressureWatch& operator=(const PressureWatch&) = delete;

 private:
  void watch();
  // Whether the group's memory is near its memory.high, or memory.max where that is lower.
  bool near_limit(Level* level) const;

  const std::function<void(Level)> react_;
  std::string group_;       // directory; empty: the whole system
  int pressure_ = -1;       // the file with our trigger; -1: none, only the limits are watched
  int64_t owner_ = 0;       // process that the thread runs in
  int stop_[2] = {-1, -1};  // a pipe: a byte in it ends the thread
  std::thread thread_;
};

}  // namespace edge_qkv
