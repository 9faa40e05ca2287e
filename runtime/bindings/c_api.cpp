// The C ABI over Session and the engines: checks pointers, catches everything, keeps the last error.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "core/attention.h"
#include "core/error.h"
#include "core/memory.h"
#include "core/session.h"
#include "edge_qkv.h"
#include "engines/engine.h"
#include "message.h"

using namespace edge_qkv;

struct eqkv_model {
  std::shared_ptr<const EngineModel> engine;  // shared with the sessions, whatever is closed first
};

struct eqkv_session {
  Session session;
  mutable std::mutex in_use;  // a second thread is refused, not undefined
};

namespace {

// Plain memory: it needs no destructor, so a thread may end after the library was closed.
thread_local char last_error[1024] = "";

eqkv_status keep(eqkv_status status, const char* sentence) noexcept {
  copy_message(sentence, last_error, sizeof last_error);
  return status;
}

template <class Function>
eqkv_status guarded(Function function) noexcept {
  try {
    function();
    return EQKV_OK;
  } catch (const Error& error) {
    return keep(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.");
  } catch (const std::length_error&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.");
  } catch (const std::exception& error) {
    return keep(EQKV_ENGINE_FAILED, error.what());
  } catch (...) {
    return keep(EQKV_ENGINE_FAILED, "An unknown error occurred.");
  }
}

template <class Pointer>
void require(Pointer pointer, const char* name) {
  if (!pointer) throw Error(EQKV_INVALID_ARGUMENT, std::string("The argument ") + name + " is null.");
}

// A struct_size beyond this is no newer version but an uninitialised struct.
constexpr size_t kMostStructBytes = 4096;

template <class Struct>
size_t struct_size(const Struct* given) {
  const size_t size = given->struct_size;
  if (size < sizeof size || size > kMostStructBytes) {
    throw Error(EQKV_INVALID_ARGUMENT, "struct_size is not set; set it to sizeof the struct.");
  }
  return size;
}

// Options of a caller that may be older (fields it does not know keep `defaults`) or newer (fields that
// we do not know must be zero: an option is refused rather than ignored).
template <class Struct>
Struct read_options(const Struct* given, Struct defaults) {
  const size_t size = struct_size(given);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof defaults), bytes + size,
                  [](unsigned char b) { return b; })) {
    throw Error(EQKV_INVALID_ARGUMENT, "The caller sets an option that this version of edge-qkv lacks.");
  }
  std::memcpy(&defaults, given, std::min(size, sizeof defaults));
  return defaults;
}

// As much of `info` as the caller knows, and zeros where it knows more.
template <class Struct>
void write_info(Struct* out, Struct info) {
  const size_t size = struct_size(out);
  info.struct_size = size;
  std::memset(reinterpret_cast<void*>(out), 0, size);
  std::memcpy(reinterpret_cast<void*>(out), &info, std::min(size, sizeof info));
}

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
    const EngineOptions engine{read.engine_library ? read.engine_library : "", read.threads};
    *model = new eqkv_model{open_model(path, engine)};
  });
}

void eqkv_model_close(eqkv_model* model) { delete model; }

eqkv_status eqkv_model_get_info(const eqkv_model* model, eqkv_model_info* info) {
  return guarded([&] {
    require(model, "model");
    require(info, "info");
    const ModelInfo& m = model->engine->info();
    write_info(info, {0, m.engine, facts(m.cache.type).name, m.vocab_size, m.cache.layers,
                      m.cache.kv_heads, m.cache.head_dim, m.max_positions, m.cache.token_bytes()});
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
