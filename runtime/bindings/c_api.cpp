// The C ABI over Session and the engines: checks pointers, catches everything, keeps the last error.
#include <memory>
#include <mutex>
#include <string>

#include "binding.h"
#include "core/attention.h"
#include "core/memory.h"
#include "core/session.h"
#include "edge_qkv.h"
#include "engines/engine.h"
#include "plan_api.h"

using namespace edge_qkv;

struct eqkv_model {
  std::shared_ptr<const EngineModel> engine;  // shared with the sessions, whatever is closed first
  Plan plan;  // its context and chunk are the most that a session may have
};

struct eqkv_session {
  Session session;
  mutable std::mutex in_use;  // a second thread is refused, not undefined
};

namespace {

// Runs function(session) while no other thread is in it.
template <class Handle, class Function>
eqkv_status with_session(Handle* handle, Function function) noexcept {
  return guarded([&] {
    require(handle, "session");
    const std::unique_lock<std::mutex> lock(handle->in_use, std::try_to_lock);
    if (!lock) {
      throw Error(EQKV_INVALID_ARGUMENT,
                  "The session is in use by another thread; open one for each thread.");
    }
    function(handle->session);
  });
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
    const Plan plan = plan_to_open(path, read);
    *model = new eqkv_model{open_model(path, engine_options(read)), plan};
  });
}

void eqkv_model_close(eqkv_model* model) { delete model; }

eqkv_status eqkv_model_get_info(const eqkv_model* model, eqkv_model_info* info) {
  return guarded([&] {
    require(model, "model");
    require(info, "info");
    const ModelInfo& m = model->engine->info();
    eqkv_model_info all = {0,
                           m.engine,
                           facts(m.cache.type).name,
                           m.vocab_size,
                           m.cache.layers,
                           m.cache.kv_heads,
                           m.cache.head_dim,
                           m.max_positions,
                           m.cache.token_bytes(),
                           m.packed,
                           model->plan.context,
                           {}};
    std::memcpy(all.fingerprint, m.fingerprint.data(),
                std::min(m.fingerprint.size(), sizeof all.fingerprint - 1));
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
    *session = new eqkv_session{{model->engine, {read.context, read.prefill_chunk}}, {}};
  });
}

void eqkv_session_close(eqkv_session* session) { delete session; }

eqkv_status eqkv_session_evaluate(eqkv_session* session, const int32_t* tokens, size_t count,
                                  float* logits) {
  return with_session(session, [&](Session& s) {
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
  return with_session(session, [&](Session& s) {
    require(options, "options");
    const SamplerOptions d;
    const eqkv_sampler_options o =
        read_options(options, {0, d.temperature, d.top_k, d.top_p, d.min_p, d.repetition_penalty,
                               d.repetition_window, d.seed});
    s.set_sampler(
        {o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty, o.repetition_window, o.seed});
  });
}

eqkv_status eqkv_session_sample(eqkv_session* session, int32_t* token) {
  return with_session(session, [&](Session& s) {
    require(token, "token");
    *token = s.sample();
  });
}

eqkv_status eqkv_session_rewind(eqkv_session* session, int64_t length) {
  return with_session(session, [&](Session& s) { s.rewind(length); });
}

void eqkv_session_cancel(eqkv_session* session) {
  if (session) guarded([&] { session->session.cancel(); });
}

eqkv_status eqkv_session_fill(eqkv_session* session, int64_t length, uint64_t seed) {
  return with_session(session, [&](Session& s) { s.fill(length, seed); });
}

eqkv_status eqkv_session_length(const eqkv_session* session, int64_t* length) {
  return with_session(session, [&](const Session& s) {
    require(length, "length");
    *length = s.length();
  });
}

eqkv_status eqkv_session_get_info(const eqkv_session* session, eqkv_session_info* info) {
  return with_session(session, [&](const Session& s) {
    require(info, "info");
    const uint64_t used = static_cast<uint64_t>(s.length() * s.cache().view().layout.token_bytes());
    write_info(info, {0, s.length(), s.context(), used, s.cache().committed_bytes(),
                      s.cache().reserved_bytes()});
  });
}

}  // extern "C"
