/* edge-qkv: run a language model with a unified KV cache. The C ABI of libedge_qkv.
 *
 * Tokens in, tokens out: text is the caller's. A model is loaded once and shared by any number of
 * sessions; a session is one conversation with its own cache and is used by one thread at a time, except
 * for eqkv_session_cancel, which any thread may call. Sessions of one model may run in parallel.
 *
 * Every function that can fail returns an eqkv_status; eqkv_last_error() then holds one sentence for a
 * person. Nothing throws or aborts through this interface. Structs start with `struct_size` (set it to
 * sizeof the struct) so that fields can be added at their end.
 */
#ifndef EDGE_QKV_H_
#define EDGE_QKV_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EQKV_API __declspec(dllexport)
#else
#define EQKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum eqkv_status {
  EQKV_OK = 0,
  EQKV_INVALID_ARGUMENT = 1, /* the caller passed something unusable */
  EQKV_BAD_PACKAGE = 2,      /* missing, damaged or foreign model files */
  EQKV_ENGINE_MISSING = 3,   /* the engine's library cannot be opened or is too old */
  EQKV_ENGINE_FAILED = 4,    /* the engine reported an error while running */
  EQKV_CONTEXT_FULL = 5,     /* the tokens do not fit into the session's context */
  EQKV_CANCELLED = 6,        /* eqkv_session_cancel was called */
  EQKV_OUT_OF_MEMORY = 7
} eqkv_status;

typedef struct eqkv_model eqkv_model;
typedef struct eqkv_session eqkv_session;

/* ---- library ---- */

/* Version of this interface; grows when it changes incompatibly. */
#define EQKV_ABI_VERSION 1
EQKV_API int eqkv_abi_version(void);

/* Instruction set of the attention kernel: "baseline", "avx2", "avx512", "armv8", "dotprod", "i8mm". */
EQKV_API const char* eqkv_isa(void);

/* What went wrong in the last call of this thread that did not return EQKV_OK. Never null. */
EQKV_API const char* eqkv_last_error(void);

/* Memory of this process from the kernel's own accounting, in bytes. */
typedef struct eqkv_memory_info {
  size_t struct_size;
  uint64_t resident;      /* pages in RAM now */
  uint64_t anonymous;     /* of these, not backed by a file: cannot be dropped under pressure */
  uint64_t file_backed;   /* of these, backed by a file: the kernel may drop them */
  uint64_t peak_resident; /* largest `resident` so far */
} eqkv_memory_info;
EQKV_API eqkv_status eqkv_memory(eqkv_memory_info* info);

/* ---- model ---- */

typedef struct eqkv_model_options {
  size_t struct_size;
  const char* engine_library; /* path of the engine's shared library; null: the system's search path */
  int32_t threads;            /* 0: one for each core */
} eqkv_model_options;

/* Opens the package directory (or model file) at `path`. */
EQKV_API eqkv_status eqkv_model_open(const char* path, const eqkv_model_options* options,
                                     eqkv_model** model);
EQKV_API void eqkv_model_close(eqkv_model* model); /* after its sessions are closed */

typedef struct eqkv_model_info {
  size_t struct_size;
  const char* engine;     /* "onnxruntime"; lives as long as the library */
  const char* cache_type; /* "fp32" or "fp16"; lives as long as the library */
  int64_t vocab_size;
  int64_t layers;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t max_positions;         /* longest context the model allows */
  int64_t cache_bytes_per_token; /* over all layers */
} eqkv_model_info;
EQKV_API eqkv_status eqkv_model_get_info(const eqkv_model* model, eqkv_model_info* info);

/* ---- session ---- */

typedef struct eqkv_session_options {
  size_t struct_size;
  int64_t context;       /* capacity in tokens: reserves address space, commits memory as rows arrive */
  int64_t prefill_chunk; /* tokens evaluated at once; 0: 128 */
} eqkv_session_options;

EQKV_API eqkv_status eqkv_session_open(eqkv_model* model, const eqkv_session_options* options,
                                       eqkv_session** session);
EQKV_API void eqkv_session_close(eqkv_session* session); /* not during another call, cancel included */

/* Appends tokens (prefill or decode) and keeps the logits that follow the last one. When `logits` is not
 * null it receives the logits of every new token, [count, vocab_size]. A prompt that does not fit is
 * refused as a whole; after EQKV_CANCELLED the chunks already evaluated stay. */
EQKV_API eqkv_status eqkv_session_evaluate(eqkv_session* session, const int32_t* tokens, size_t count,
                                           float* logits);

/* The logits that follow the last token, [vocab_size]; valid until the session is next changed. */
EQKV_API eqkv_status eqkv_session_logits(const eqkv_session* session, const float** logits);

/* A session is greedy until this is set. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and
 * repetition_penalty 1 leave their filter out. */
typedef struct eqkv_sampler_options {
  size_t struct_size;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  float repetition_penalty;  /* > 1 makes tokens of the last `repetition_window` less likely */
  int32_t repetition_window; /* tokens; 0: the whole session */
  uint64_t seed;             /* a choice depends on seed, logits and tokens alone, also after a rewind */
} eqkv_sampler_options;
EQKV_API eqkv_status eqkv_session_set_sampler(eqkv_session* session,
                                              const eqkv_sampler_options* options);

/* Chooses the next token from the last logits. It is not appended: evaluate it to go on. */
EQKV_API eqkv_status eqkv_session_sample(eqkv_session* session, int32_t* token);

/* Forgets all but the first `length` tokens. The next evaluate goes on from there. */
EQKV_API eqkv_status eqkv_session_rewind(eqkv_session* session, int64_t length);

/* Stops the evaluate that is running, or else the next one. Safe from any thread. */
EQKV_API void eqkv_session_cancel(eqkv_session* session);

/* Fills the cache up to `length` rows with reproducible noise instead of tokens (token history: zeros),
 * to measure a deep context without the hours that its prefill would take. */
EQKV_API eqkv_status eqkv_session_fill(eqkv_session* session, int64_t length, uint64_t seed);

/* Tokens in the cache. */
EQKV_API eqkv_status eqkv_session_length(const eqkv_session* session, int64_t* length);

typedef struct eqkv_session_info {
  size_t struct_size;
  int64_t length;           /* tokens in the cache */
  int64_t context;          /* capacity in tokens */
  uint64_t cache_used;      /* bytes of the rows written */
  uint64_t cache_committed; /* bytes of the cache in RAM, from the kernel */
  uint64_t cache_reserved;  /* bytes of the cache at full context */
} eqkv_session_info;
/* Asks the kernel about every page of the cache: milliseconds for a cache of gigabytes. */
EQKV_API eqkv_status eqkv_session_get_info(const eqkv_session* session, eqkv_session_info* info);

#ifdef __cplusplus
}
#endif

#endif /* EDGE_QKV_H_ */
