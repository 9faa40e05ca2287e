#include "log.h"

#include <executorch/runtime/platform/platform.h>

namespace edge_qkv::et {
namespace {

thread_local std::string* kept = nullptr;  // null: no guard in this thread
pal_emit_log_message_method passed_on = nullptr;
pal_abort_method aborted_before = nullptr;

void emit(et_timestamp_t timestamp, et_pal_log_level_t level, const char* file, const char* function,
          size_t line, const char* message, size_t length) {
  if (!kept) {
    if (passed_on) passed_on(timestamp, level, file, function, line, message, length);
    return;
  }
  const bool serious = level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal;
  if (serious && kept->empty()) kept->assign(message, length);
}

// What ExecuTorch asserts of a program is no reason to end the process that tried to load it.
void stop() {
  if (!kept) return aborted_before();
  const std::string why = first_logged();
  throw Aborted(why.empty() ? "it gave up" : why);
}

// ExecuTorch's bindings for Python do the same when they are imported: the last one is heard.
void install() {
  using executorch::runtime::PalImpl;
  const PalImpl* before = executorch::runtime::get_pal_impl();
  if (before->emit_log_message == emit) return;
  passed_on = before->emit_log_message;
  if (before->abort != stop) aborted_before = before->abort;
  executorch::runtime::register_pal(
      PalImpl::create(nullptr, stop, nullptr, nullptr, emit, nullptr, nullptr, __FILE__));
}

}  // namespace

LogGuard::LogGuard() {
  install();
  kept = new std::string;
}

LogGuard::~LogGuard() {
  delete kept;
  kept = nullptr;
}

std::string first_logged() {
  std::string text = kept ? *kept : "";
  while (!text.empty() && (text.back() == '.' || text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

void forget_logged() {
  if (kept) kept->clear();
}

}  // namespace edge_qkv::et
