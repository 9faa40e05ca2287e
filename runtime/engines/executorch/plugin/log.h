// What ExecuTorch logs while we call it becomes part of our message, instead of lines on the terminal.
#pragma once

#include <stdexcept>
#include <string>

namespace edge_qkv::et {

// Where ExecuTorch would have ended the process; what() is a part of a sentence.
class Aborted : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// While one exists, what this thread logs is kept, and where it would abort, Aborted is thrown; what
// others do goes where it went before. Throws Error where another copy of this library listens already:
// each would pass on what it hears to the other.
class LogGuard {
 public:
  LogGuard();
  ~LogGuard();
  LogGuard(const LogGuard&) = delete;
  LogGuard& operator=(const LogGuard&) = delete;
};

// The first error that was logged since the guard was made, as a part of a sentence; or empty.
std::string first_logged();

// Whether XNNPACK found packed weights to be of another kernel, and packed those anew, in memory.
bool logged_repacking();

// Forgets both: what is asked of ExecuTorch before a
// program is loaded may log that something is not there.
void forget_logged();

}  // namespace edge_qkv::et
