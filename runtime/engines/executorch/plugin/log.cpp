#include "log.h"

#include <executorch/runtime/platform/platform.h>

#include <atomic>
#include <string_view>

#include "core/error.h"

namespace edge_qkv::et {
namespace {

using executorch::runtime::PalImpl;

struct Kept {
  std::string error;
  bool repacking = false;
};
thread_local Kept* kept = nullptr;  // null: no guard in this thread

// Set once others' are known; read by whatever thread logs.
std::atomic<pal_emit_log_message_method> passed_on{nullptr};
std::atomic<pal_abort_method> aborted_before{nullptr};

constexpr const char kOurs[] = "edge-qkv";  // told from another copy's by its address

void emit(et_timestamp_t timestamp, et_pal_log_level_t level, const char* file, const char* function,
          size_t line, const char* message, size_t length) {
  if (!kept) {
    if (const auto before = passed_on.load()) {
      before(timestamp, level, file, function, line, message, length);
    }
    return;
  }
  const std::string_view text(message, length);
  if (text.find("seed mismatch") != text.npos) kept->repacking = true;
  const bool serious = level == et_pal_log_level_t::kError || level == et_pal_log_level_t::kFatal;
  // XNNPACK wants packed weights for itself alone and goes on without, see LoadedProgram::load_method.
  const bool expected = text.rfind("flock(", 0) == 0;
  if (serious && !expected && kept->error.empty()) kept->error = text;
}

// What ExecuTorch asserts of a program is no reason to end the process that tried to load it.
void stop() {
  if (!kept) return aborted_before.load()();
  const std::string why = first_logged();
  throw Aborted(why.empty() ? "it gave up" : why);
}

// ExecuTorch's bindings for Python do the same when they are imported: the last one is heard. Written to
// the table itself, for register_pal() logs that it was called before, to those who were.
void install() {
  auto* table = const_cast<PalImpl*>(executorch::runtime::get_pal_impl());
  if (table->emit_log_message == emit) return;
  const char* owner = table->source_filename;
  if (owner && owner != kOurs && std::string_view(owner) == kOurs) {
    throw Error(EQKV_ENGINE_MISSING,
                "The ExecuTorch engine cannot be opened: this process has opened another copy of "
                "libedge_qkv_executorch; name the same file wherever engine_library or "
                "EDGE_QKV_EXECUTORCH_LIBRARY is given.");
  }
  passed_on = table->emit_log_message;
  if (table->abort != stop) aborted_before = table->abort;
  table->source_filename = kOurs;
  table->abort = stop;
  table->emit_log_message = emit;
}

}  // namespace

LogGuard::LogGuard() {
  install();
  kept = new Kept;
}

LogGuard::~LogGuard() {
  delete kept;
  kept = nullptr;
}

std::string first_logged() {
  std::string text = kept ? kept->error : "";
  while (!text.empty() && (text.back() == '.' || text.back() == '\n' || text.back() == ' ')) {
    text.pop_back();
  }
  return text;
}

bool logged_repacking() { return kept && kept->repacking; }

void forget_logged() {
  if (kept) *kept = {};
}

}  // namespace edge_qkv::et
