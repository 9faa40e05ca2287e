// The C ABI over models and sessions: checks pointers, catches everything, keeps the last error.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "attention/attention.h"
#include "binding.h"
#include "core/memory.h"
#include "core/pressure.h"
#include "core/session.h"
#include "core/session_pool.h"
#include "edge_qkv.h"
#include "engines/engines.h"
#include "plan_api.h"

using namespace edge_qkv;

struct eqkv_model {
  // Shared with the sessions, whatever is closed first.
  std::shared_ptr<const EngineModel> engine;
  std::shared_ptr<SessionPool> pool;
  Plan plan;  // its context and, with a budget, its chunk are the most that a session may have
  bool has_budget = false;
  std::unique_ptr<PressureWatch> watch;
};

struct eqkv_session {
  eqkv_session(std::shared_ptr<SessionPool> shared, std::unique_ptr<Session> opened)
      : pool(std::move(shared)), member(std::make_shared<PooledSession>(std::move(opened))) {
    pool->add(member);
  }
  ~eqkv_session() { pool->remove(member); }

  const std::shared_ptr<SessionPool> pool;
  const SessionPool::Member member;  // outlives the handle while the pool is moving its cache
  std::atomic<bool> entered{false};  // a second thread is refused, not undefined
};

namespace {

SamplerOptions sampler_options(const eqkv_sampler_options* given) {
  require(given, "options");
  const SamplerOptions d;
  const eqkv_sampler_options o = read_options(
      given,
      {0, d.temperature, d.top_k, d.top_p, d.min_p, d.repetition_penalty, d.repetition_window, d.seed});
  return {o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty, o.repetition_window, o.seed};
}

// Runs function(session) while no other thread of the caller is in it.
template <class Handle, class Function>
eqkv_status with_session(Handle* handle, Function function) noexcept {
  return guarded([&] {
    require(handle, "session");
    auto* session = const_cast<eqkv_session*>(handle);
    if (session->entered.exchange(true)) {
      throw Error(EQKV_INVALID_ARGUMENT,
                  "The session is in use by another thread; open one for each thread.");
    }
    const std::unique_ptr<std::atomic<bool>, void (*)(std::atomic<bool>*)> leave(
        &session->entered, [](std::atomic<bool>* entered) { entered->store(false); });
    const std::lock_guard<std::mutex> lock(session->member->in_use);  // the pool may be trimming it
    function(*session->member->session);
  });
}

// The same for what needs rows of the cache in RAM: function(session) makes them `rows(session)` many.
template <class Rows, class Function>
eqkv_status with_rows(eqkv_session* handle, Rows rows, Function function) noexcept {
  std::unique_lock<std::mutex> turn;
  const eqkv_status waited = guarded([&] {
    require(handle, "session");
    turn = handle->pool->take_turn();
  });
  if (waited != EQKV_OK) return waited;
  return with_session(handle, [&](Session& s) {
    const auto settle = [&](Session* used) { handle->pool->settle(handle->member, used->length()); };
    const std::unique_ptr<Session, decltype(settle)> at_end(&s, settle);  // also after an error
    handle->pool->make_room(handle->member, std::clamp(rows(s), s.length(), s.context()));
    function(s);
    if (turn) s.release_workspace();  // a budget counts one session's
  });
}

// Absolute, for the process may change its directory.
std::string spill_directory(const char* given) {
  const char* temporary = std::getenv("TMPDIR");
  const char* chosen = given ? given : temporary && *temporary ? temporary : "/tmp";
  const std::unique_ptr<char, void (*)(void*)> resolved(realpath(chosen, nullptr), std::free);
  if (resolved && access(resolved.get(), W_OK | X_OK) == 0) return resolved.get();
  if (!given) return chosen;  // nobody has asked for it yet
  throw Error(EQKV_INVALID_ARGUMENT, std::string(given) + ": caches cannot be moved there (" +
                                         std::strerror(errno) +
                                         "); name a directory that can be written to as spill.");
}

SessionOptions session_options(const eqkv_model& model, const eqkv_session_options& read) {
  SessionOptions options;
  const Plan& plan = model.plan;
  options.context = read.context == 0 ? plan.context : read.context;
  options.prefill_chunk = read.prefill_chunk;
  options.margin = read.margin;
  if (read.overflow < EQKV_OVERFLOW_ERROR || read.overflow > EQKV_OVERFLOW_SHIFT) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "The overflow policy " + std::to_string(read.overflow) + " is unknown.");
  }
  options.overflow = {static_cast<eqkv_overflow>(read.overflow), read.sinks, read.window, read.block};
  if (model.has_budget && options.context > plan.context) {
    throw Error(EQKV_OVER_BUDGET,
                "A context of " + std::to_string(options.context) +
                    " tokens is more than the model's memory budget was planned for, " +
                    std::to_string(plan.context) + ".");
  }
  const int64_t chunk = chunk_tokens(options.prefill_chunk,
                                     model.engine->info().description.prefill_chunk, options.context);
  if (model.has_budget && chunk > plan.prefill_chunk) {
    throw Error(EQKV_OVER_BUDGET,
                "A prefill chunk of " + std::to_string(chunk) +
                    " tokens is more than the model's memory budget was planned for, " +
                    std::to_string(plan.prefill_chunk) + ".");
  }
  const CacheLayout& layout = model.engine->info().layout;
  if (model.has_budget && options.margin > 0 &&
      resident_bytes(layout, options.context, options.margin, chunk) > plan.all_caches) {
    throw Error(EQKV_OVER_BUDGET, "A margin of " + std::to_string(options.margin) +
                                      " tokens needs more cache than the model's memory budget "
                                      "leaves; leave it out or open a shorter session.");
  }
  return options;
}

}  // namespace

extern "C" {

int eqkv_abi_version(void) { return EQKV_ABI_VERSION; }

const char* eqkv_isa(void) { return isa_name(); }

const char* eqkv_last_error(void) { return last_error; }

eqkv_status eqkv_memory(eqkv_memory_info* info) {
  return guarded([&] {
    require(info, "info");
    const MemoryUse use = memory_use();
    write_info(info, {0, use.resident, use.anonymous, use.file_backed, use.peak_resident});
  });
}

eqkv_status eqkv_model_open(const char* path, const eqkv_model_options* options, eqkv_model** model) {
  return guarded([&] {
    require(model, "model");
    *model = nullptr;
    require(path, "path");
    if (const char* forced = isa_error()) throw Error(EQKV_INVALID_ARGUMENT, forced);
    eqkv_model_options read = {};
    if (options) read = read_options(options, read);
    auto opened = std::make_unique<eqkv_model>();
    const ModelInfo described = describe_model(path);
    opened->plan = plan_to_open(described, read);
    opened->has_budget = read.memory > 0;
    opened->engine = load_model(described, engine_options(read));
    opened->pool = std::make_shared<SessionPool>(opened->engine, spill_directory(read.spill),
                                                 opened->has_budget ? opened->plan.all_caches : 0);
    *model = opened.release();
  });
}

void eqkv_model_close(eqkv_model* model) { delete model; }

eqkv_status eqkv_model_trim(eqkv_model* model, int32_t level) {
  return guarded([&] {
    require(model, "model");
    if (level < 0 || level > EQKV_TRIM_ALL) {
      throw Error(EQKV_INVALID_ARGUMENT, "The trim level must be from 0 (nothing) to 3 (all).");
    }
    if (level > 0) model->pool->trim(static_cast<eqkv_trim_level>(level));
  });
}

int32_t eqkv_android_trim_level(int32_t level) {
  // ComponentCallbacks2. Since API 34 only UI_HIDDEN and BACKGROUND arrive.
  constexpr struct {
    int android, ours;
  } kLevels[] = {
      {5, EQKV_TRIM_WORKSPACE},  // RUNNING_MODERATE
      {10, EQKV_TRIM_IDLE},      // RUNNING_LOW
      {15, EQKV_TRIM_ALL},       // RUNNING_CRITICAL
      {20, EQKV_TRIM_IDLE},      // UI_HIDDEN
      {40, EQKV_TRIM_ALL},       // BACKGROUND
      {60, EQKV_TRIM_ALL},       // MODERATE
      {80, EQKV_TRIM_ALL},       // COMPLETE
  };
  for (const auto& known : kLevels) {
    if (known.android == level) return known.ours;
  }
  return 0;
}

eqkv_status eqkv_model_watch_pressure(eqkv_model* model, const char* cgroup) {
  return guarded([&] {
    require(model, "model");
    if (model->watch) throw Error(EQKV_INVALID_ARGUMENT, "The model watches memory pressure already.");
    model->watch = std::make_unique<PressureWatch>(
        cgroup ? cgroup : "", [pool = model->pool](PressureWatch::Level level) {
          // What cannot be spilled stays; there is nobody to tell.
          guarded([&] {
            pool->trim(level == PressureWatch::Level::kSome ? EQKV_TRIM_IDLE : EQKV_TRIM_ALL);
          });
        });
  });
}

eqkv_status eqkv_model_get_info(const eqkv_model* model, eqkv_model_info* info) {
  return guarded([&] {
    require(model, "model");
    require(info, "info");
    const ModelInfo& m = model->engine->info();
    eqkv_model_info all = {0,
                           m.engine,
                           cache_type_info(m.layout.type).name,
                           m.description.vocab_size,
                           m.description.layers(),
                           m.description.max_positions,
                           m.layout.token_bytes(),
                           m.packed,
                           model->plan.context,
                           "",
                           m.text.c_str()};
    std::snprintf(all.fingerprint, sizeof all.fingerprint, "%s", m.fingerprint.c_str());
    write_info(info, all);
  });
}

eqkv_status eqkv_session_open(eqkv_model* model, const eqkv_session_options* options,
                              eqkv_session** session) {
  return guarded([&] {
    require(session, "session");
    *session = nullptr;
    require(model, "model");
    require(options, "options");
    const eqkv_session_options read = read_options(options, {});
    *session = new eqkv_session(model->pool,
                                std::make_unique<Session>(model->engine, session_options(*model, read)));
  });
}

void eqkv_session_close(eqkv_session* session) { delete session; }

eqkv_status eqkv_session_evaluate(eqkv_session* session, const int32_t* tokens, size_t count,
                                  float* logits) {
  const auto rows = [&](const Session& s) {
    return count > static_cast<size_t>(s.context()) ? s.context()
                                                    : s.length() + static_cast<int64_t>(count);
  };
  return with_rows(session, rows, [&](Session& s) {
    if (count > 0) require(tokens, "tokens");
    s.evaluate(tokens, count, logits);
  });
}

eqkv_status eqkv_session_logits(const eqkv_session* session, const float** logits) {
  return with_session(session, [&](const Session& s) {
    require(logits, "logits");
    *logits = s.logits();
  });
}

eqkv_status eqkv_session_set_sampler(eqkv_session* session, const eqkv_sampler_options* options) {
  return with_session(session, [&](Session& s) { s.set_sampler(sampler_options(options)); });
}

eqkv_status eqkv_sample(const float* logits, size_t vocab_size, const int32_t* tokens, size_t count,
                        const eqkv_sampler_options* options, int32_t* token) {
  return guarded([&] {
    require(logits, "logits");
    require(token, "token");
    if (count > 0) require(tokens, "tokens");
    if (vocab_size == 0) throw Error(EQKV_INVALID_ARGUMENT, "There are no logits to choose from.");
    const bool known = std::all_of(tokens, tokens + count, [&](int32_t t) {
      return t >= 0 && static_cast<size_t>(t) < vocab_size;
    });
    if (!known) throw Error(EQKV_INVALID_ARGUMENT, "A token of the history is not in the vocabulary.");
    *token = Sampler(sampler_options(options)).sample(logits, vocab_size, {tokens, tokens + count});
  });
}

bool eqkv_is_set(void* flag) {
  return __atomic_load_n(static_cast<int32_t*>(flag), __ATOMIC_RELAXED) != 0;
}

eqkv_status eqkv_session_sample(eqkv_session* session, int32_t* token) {
  return with_session(session, [&](Session& s) {
    require(token, "token");
    *token = s.sample();
  });
}

eqkv_status eqkv_session_rewind(eqkv_session* session, int64_t length, eqkv_progress progress,
                                void* data, int64_t* evaluated) {
  bool evaluates = false;  // which waits for its turn, and has the rows in RAM
  const eqkv_status status = with_session(session, [&](Session& s) {
    if (evaluated) *evaluated = 0;
    evaluates = length >= 0 && length <= s.length() && !s.can_go_back_to(length);
    if (evaluates) return;
    s.rewind(length);
    session->pool->settle(session->member, s.length());
  });
  if (status != EQKV_OK || !evaluates) return status;
  const auto rows = [&](const Session&) { return length; };
  return with_rows(session, rows, [&](Session& s) {
    const int64_t again = s.rewind(length, [&](int64_t done, int64_t total) {
      if (progress) progress(data, done, total);
    });
    if (evaluated) *evaluated = again;
  });
}

eqkv_status eqkv_session_match(eqkv_session* session, const int32_t* tokens, size_t count,
                               int64_t* kept) {
  return with_session(session, [&](Session& s) {
    if (count > 0) require(tokens, "tokens");
    require(kept, "kept");
    *kept = s.match(tokens, count);
    session->pool->settle(session->member, s.length());
  });
}

eqkv_status eqkv_session_fork(eqkv_session* session, eqkv_session** fork) {
  return with_session(session, [&](Session& s) {
    require(fork, "fork");
    *fork = nullptr;
    *fork = new eqkv_session(session->pool, s.fork(session->pool->spill_directory()));
    session->pool->settle(session->member, 0);  // the rows are in a file now
  });
}

eqkv_status eqkv_session_save(eqkv_session* session, const char* path) {
  const auto rows = [](const Session& s) { return s.length(); };  // of a spilled session, read again
  return with_rows(session, rows, [&](Session& s) {
    require(path, "path");
    s.save(path);
  });
}

eqkv_status eqkv_session_restore(eqkv_session* session, const char* path) {
  return with_session(session, [&](Session& s) {
    require(path, "path");
    s.restore(path);
    session->pool->settle(session->member, 0);
  });
}

void eqkv_session_cancel(eqkv_session* session) {
  if (session) guarded([&] { session->member->session->cancel(); });
}

eqkv_status eqkv_session_fill(eqkv_session* session, int64_t length, uint64_t seed) {
  return with_rows(
      session, [&](const Session&) { return length; }, [&](Session& s) { s.fill(length, seed); });
}

eqkv_status eqkv_session_length(const eqkv_session* session, int64_t* length) {
  return with_session(session, [&](const Session& s) {
    require(length, "length");
    *length = s.length();
  });
}

eqkv_status eqkv_session_tokens(const eqkv_session* session, int32_t* tokens, size_t capacity,
                                size_t* count) {
  return with_session(session, [&](const Session& s) {
    require(count, "count");
    if (capacity > 0) require(tokens, "tokens");
    *count = s.tokens().size();
    std::copy_n(s.tokens().begin(), std::min(capacity, *count), tokens);
  });
}

eqkv_status eqkv_session_get_info(const eqkv_session* session, eqkv_session_info* info) {
  return with_session(session, [&](const Session& s) {
    require(info, "info");
    const uint64_t used = s.cache().live_bytes(s.length());
    write_info(info, {0, s.length(), s.context(), used, s.cache().committed_bytes(),
                      s.cache().reserved_bytes(), s.dropped()});
  });
}

}  // extern "C"
