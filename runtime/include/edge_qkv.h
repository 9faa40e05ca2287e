/* edge-qkv: run a language model with a unified KV cache. The C ABI of libedge_qkv.
 *
 * Tokens in, tokens out: text is the caller's. A model is loaded once and shared by any number of
 * sessions; a session is one conversation with its own cache and is used by one thread at a time, except
 * for eqkv_session_cancel, which any thread may call. Sessions of one model may run in parallel; those
 * of a model with a memory budget, and all with ExecuTorch, evaluate in turns.
 *
 * Every function that can fail returns an eqkv_status; eqkv_last_error() then holds one sentence for a
 * person. Nothing throws or aborts through this interface, but for what ExecuTorch does itself: a
 * program that is damaged, or made to do harm, can end the process inside of it. Check the files of a
 * package against its edge_qkv.json before you open it, as the Python package does. Structs start with
 * `struct_size` (set it to sizeof the struct) so that fields can be added at their end.
 */
#ifndef EDGE_QKV_H_
#define EDGE_QKV_H_

#include <stdbool.h>
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
  EQKV_OUT_OF_MEMORY = 7,
  EQKV_OVER_BUDGET = 8, /* the memory budget does not hold what was asked for */
  EQKV_BAD_SNAPSHOT = 9 /* a damaged snapshot, or one of another model */
} eqkv_status;

typedef struct eqkv_model eqkv_model;
typedef struct eqkv_session eqkv_session;

/* ---- library ---- */

/* Version of this interface; grows when a caller of the new one cannot use the old. */
#define EQKV_ABI_VERSION 4
EQKV_API int eqkv_abi_version(void);

/* Instruction set of the attention kernel: "baseline", "avx2", "avxvnni", "avx512",
   "armv8", "dotprod", "i8mm". */
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

/* ---- plan ---- */

typedef struct eqkv_plan_options {
  size_t struct_size;
  uint64_t memory;        /* budget in bytes; 0: none */
  int64_t context;        /* tokens; 0: the longest that the budget holds, without one max_positions */
  int64_t prefill_chunk;  /* tokens evaluated at once; 0: 128; the model may allow fewer */
  int32_t threads;        /* 0: one for each core */
  const char* cache_type; /* "fp32", "fp16" or "int8"; null: what the description has */
  int32_t packed;         /* whether the weights are packed for this processor, see eqkv_model_pack */
  const char* engine;     /* "onnxruntime" or "executorch"; null: onnxruntime; of a package it is the
                             package's */
  int64_t margin;         /* as in eqkv_session_options */
} eqkv_plan_options;

/* Bytes beyond what the process has without the runtime. */
typedef struct eqkv_plan_info {
  size_t struct_size;
  int64_t context;       /* tokens planned for */
  int64_t prefill_chunk; /* tokens */
  int32_t threads;
  const char* cache_type;     /* lives as long as the library */
  uint64_t weights_file;      /* pages of files: the kernel can drop them and read them again */
  uint64_t weights_anonymous; /* the engine's own copies */
  uint64_t cache;             /* at full context */
  uint64_t workspace;        /* of one evaluation of a prefill chunk, or of loading where that is more */
  uint64_t engine_file;      /* code of the engine */
  uint64_t engine_anonymous; /* its structures and threads */
  uint64_t expected;         /* the sum of the above: the peak at full context */
  uint64_t margin;           /* what measurements differ by */
  uint64_t total;            /* expected + margin: the least budget for this context */
  uint64_t anonymous;        /* of the total, what no pressure gives back */
  uint64_t weight_bytes;     /* of the model's files; without files matrix_bytes and all else stored */
  uint64_t matrix_bytes;     /* of these, matrices that each token is multiplied by */
} eqkv_plan_info;

/* Plans from a description alone: the text that a model file would hold as edge_qkv.description (see
 * runtime/core/description.h). EQKV_OVER_BUDGET when `memory` does not hold it: `plan` is filled in and
 * the message names what is needed, what is allowed, and which changes would fit. */
EQKV_API eqkv_status eqkv_plan(const char* description, const eqkv_plan_options* options,
                               eqkv_plan_info* plan);

/* The same for the package at `path`, of which only the description is read. */
EQKV_API eqkv_status eqkv_plan_package(const char* path, const eqkv_plan_options* options,
                                       eqkv_plan_info* plan);

/* ---- model ---- */

typedef struct eqkv_model_options {
  size_t struct_size;
  const char* engine_library; /* path of the shared library of the package's engine: ONNX Runtime's
                                 (null: EDGE_QKV_ONNXRUNTIME, or the system's search path), or our
                                 libedge_qkv_executorch (null: EDGE_QKV_EXECUTORCH_LIBRARY, or the
                                 one beside this library) */
  int32_t threads;            /* 0: one for each core. ExecuTorch has one pool for a process:
                                 opening a model with more than 1 replaces it where the number differs,
                                 and nothing else may be computing with ExecuTorch then */
  uint64_t memory;            /* budget in bytes for the model and its sessions; 0: none */
  int64_t context;            /* with a budget: tokens of its longest session; 0: as many as it holds */
  int64_t prefill_chunk;      /* with a budget: the largest of its sessions; 0: 128 */
  const char* packed_weights; /* directory that eqkv_model_pack wrote to; null: none */
  const char* spill;          /* directory for caches of idle sessions; null: TMPDIR, or /tmp */
} eqkv_model_options;

/* Opens the package directory (or model file) at `path`. With a budget, what it cannot hold is refused
 * with EQKV_OVER_BUDGET before any weight is read; the sessions of the model share it: they evaluate one
 * at a time, and the caches of those least recently used are moved to files when one needs the room. */
EQKV_API eqkv_status eqkv_model_open(const char* path, const eqkv_model_options* options,
                                     eqkv_model** model);

/* Writes the weights of the package at `path` to options->packed_weights in the form that the engine
 * computes with on this processor. A model opened with the same directory then maps them from there:
 * they load faster and are no anonymous memory. Does nothing where that was done before. */
EQKV_API eqkv_status eqkv_model_pack(const char* path, const eqkv_model_options* options);

/* Whether that was done, by the same engine for this processor: 1, or 0. */
EQKV_API eqkv_status eqkv_model_is_packed(const char* path, const eqkv_model_options* options,
                                          int32_t* packed);

EQKV_API void eqkv_model_close(eqkv_model* model); /* after its sessions are closed */

typedef struct eqkv_model_info {
  size_t struct_size;
  const char* engine;     /* "onnxruntime" or "executorch"; lives as long as the library */
  const char* cache_type; /* "fp32", "fp16" or "int8"; lives as long as the library */
  int64_t vocab_size;
  int64_t layers;
  int64_t max_positions;         /* longest context the model allows */
  int64_t cache_bytes_per_token; /* over all layers, as if none had a window */
  int32_t packed;                /* whether the weights were mapped from packed files */
  int64_t context;               /* the most that a session may have */
  char fingerprint[65];          /* hexadecimal digits: of weights and graph, as they were exported */
  const char* description;       /* of the model file, see eqkv_plan; lives as long as the model */
} eqkv_model_info;
EQKV_API eqkv_status eqkv_model_get_info(const eqkv_model* model, eqkv_model_info* info);

/* How much a trim gives up. What was given up comes back by itself when it is used, at the cost of
 * reading it, and nothing that a session computes changes. */
typedef enum eqkv_trim_level {
  EQKV_TRIM_WORKSPACE = 1, /* buffers between evaluations */
  EQKV_TRIM_IDLE = 2,      /* and the caches of all sessions but the last used: moved to files */
  EQKV_TRIM_ALL = 3        /* and that one's cache, and the pages of the weights */
} eqkv_trim_level;

/* Trims the model and its sessions; those that are being used by another thread are left alone. */
EQKV_API eqkv_status eqkv_model_trim(eqkv_model* model, int32_t level); /* eqkv_trim_level; 0: nothing */

/* The level for Android's onTrimMemory(level), for eqkv_model_trim: UI_HIDDEN (20) is EQKV_TRIM_IDLE and
 * BACKGROUND (40) EQKV_TRIM_ALL; of those that older systems send, RUNNING_MODERATE (5) is
 * EQKV_TRIM_WORKSPACE, RUNNING_LOW (10) EQKV_TRIM_IDLE and the others EQKV_TRIM_ALL. Unknown ones are 0.
 */
EQKV_API int32_t eqkv_android_trim_level(int32_t level);

/* Linux: starts a thread that trims the model when memory gets short, until the model is closed.
 * `cgroup` is the directory of a control group of version 2 (its memory.pressure, memory.current and
 * memory.high are watched); null: the process's own, or else the whole system's /proc/pressure/memory.
 */
EQKV_API eqkv_status eqkv_model_watch_pressure(eqkv_model* model, const char* cgroup);

/* ---- session ---- */

/* What happens when tokens do not fit into the context. */
typedef enum eqkv_overflow {
  EQKV_OVERFLOW_ERROR = 0,  /* EQKV_CONTEXT_FULL */
  EQKV_OVERFLOW_WINDOW = 1, /* all but the first `sinks` and the last `window` tokens are dropped */
  EQKV_OVERFLOW_SHIFT = 2   /* the oldest `block` tokens are dropped */
} eqkv_overflow;

typedef struct eqkv_session_options {
  size_t struct_size;
  int64_t context;       /* capacity in tokens: reserves address space, commits memory as rows arrive;
                            0: the most that the model allows, with a budget that of the budget */
  int64_t prefill_chunk; /* tokens evaluated at once; 0: 128; the model may allow fewer */
  int32_t overflow;      /* eqkv_overflow. Dropped tokens are forgotten and the ones after them move up:
                            refused for learned positions, where a cached row cannot move */
  int64_t sinks;         /* with EQKV_OVERFLOW_WINDOW; 0: none */
  int64_t window;        /* with EQKV_OVERFLOW_WINDOW; 0: half of the context, sinks included */
  int64_t block;         /* with EQKV_OVERFLOW_SHIFT; 0: a quarter of the context */
  int64_t margin;        /* rows that layers with a window keep behind it, so that a rewind over as many
                            tokens finds them; 0: as many as each window */
} eqkv_session_options;

EQKV_API eqkv_status eqkv_session_open(eqkv_model* model, const eqkv_session_options* options,
                                       eqkv_session** session);
EQKV_API void eqkv_session_close(eqkv_session* session); /* not during another call, cancel included */

/* Appends tokens (prefill or decode) and keeps the logits that follow the last one. When `logits` is not
 * null it receives the logits of every new token, [count, vocab_size], for which a budget has no room:
 * the engine needs up to 4 * chunk * vocab_size bytes more. A prompt that does not fit is
 * refused as a whole, unless the session's overflow option says what to drop; after EQKV_CANCELLED the
 * chunks already evaluated stay. */
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

/* The same choice for a caller that has its logits from elsewhere, as on Core ML: logits [vocab_size]
 * after `tokens`, the whole text so far. */
EQKV_API eqkv_status eqkv_sample(const float* logits, size_t vocab_size, const int32_t* tokens,
                                 size_t count, const eqkv_sampler_options* options, int32_t* token);

/* Whether the int32_t at `flag`, which any thread may set, is not 0. For an engine of the caller's that
 * asks while it computes whether it is to stop, as llama.cpp does: a caller in Python need not be asked
 * itself. */
EQKV_API bool eqkv_is_set(void* flag);

/* `done` of `total` tokens are evaluated. Called by the thread that is in the function; of the same
 * session it may only cancel. */
typedef void (*eqkv_progress)(void* data, int64_t done, int64_t total);

/* Forgets all but the first `length` tokens. The next evaluate goes on from there. Where a layer has a
 * window and rows that the next token needs are gone (see margin), the first `length` tokens are
 * evaluated again; after EQKV_CANCELLED those that were are left. `evaluated` receives how many were, 0
 * where none had to be; it and `progress` may be null. */
EQKV_API eqkv_status eqkv_session_rewind(eqkv_session* session, int64_t length, eqkv_progress progress,
                                         void* data, int64_t* evaluated);

/* Keeps the first tokens that the session has in common with `tokens` and forgets the rest; `kept`
 * receives their number. Evaluate tokens + kept to go on: a prompt that shares its beginning with the
 * last one is not evaluated again. At least one token is left to evaluate, unless the session holds
 * exactly `tokens` and their logits. Where a layer has a window and rows that the next token needs are
 * gone, none is kept. */
EQKV_API eqkv_status eqkv_session_match(eqkv_session* session, const int32_t* tokens, size_t count,
                                        int64_t* kept);

/* Opens a session with the same options, tokens and logits (not the sampler). The cache is not copied:
 * both share its pages, and each gets its own copy of those that it changes. */
EQKV_API eqkv_status eqkv_session_fork(eqkv_session* session, eqkv_session** fork);

/* Writes tokens, cache and logits to the file `path`, which is replaced only when all is on the disk.
 * The format is described in runtime/core/snapshot.md. */
EQKV_API eqkv_status eqkv_session_save(eqkv_session* session, const char* path);

/* Puts the session into the state that was saved: the cache is mapped from the file, nothing is
 * evaluated again. The file must have been saved by the same model, with the same cache type, and its
 * tokens must fit into the context: else EQKV_BAD_SNAPSHOT, or EQKV_CONTEXT_FULL, and the session is as
 * before. Do not change the file in place afterwards; saving over it is no such change. */
EQKV_API eqkv_status eqkv_session_restore(eqkv_session* session, const char* path);

/* Stops the evaluate that is running, or else the next one. Safe from any thread. */
EQKV_API void eqkv_session_cancel(eqkv_session* session);

/* Fills the cache up to `length` rows with reproducible noise instead of tokens (token history: zeros),
 * to measure a deep context without the hours that its prefill would take. */
EQKV_API eqkv_status eqkv_session_fill(eqkv_session* session, int64_t length, uint64_t seed);

/* Tokens in the cache. */
EQKV_API eqkv_status eqkv_session_length(const eqkv_session* session, int64_t* length);

/* The tokens in the cache, in order: at most `capacity` of them go to `tokens`; `count` receives how
 * many there are. */
EQKV_API eqkv_status eqkv_session_tokens(const eqkv_session* session, int32_t* tokens, size_t capacity,
                                         size_t* count);

typedef struct eqkv_session_info {
  size_t struct_size;
  int64_t length;           /* tokens in the cache */
  int64_t context;          /* capacity in tokens */
  uint64_t cache_used;      /* bytes of the rows that tokens to come can see, and of the margin's */
  uint64_t cache_committed; /* bytes of the cache in RAM, from the kernel */
  uint64_t cache_reserved;  /* address space of the cache: its bytes at full context, and more where the
                               model file fixes the number of rows */
  int64_t dropped;          /* tokens that the overflow option has dropped so far */
} eqkv_session_info;
/* Asks the kernel about every page of the cache: milliseconds for a cache of gigabytes. */
EQKV_API eqkv_status eqkv_session_get_info(const eqkv_session* session, eqkv_session_info* info);

#ifdef __cplusplus
}
#endif

#endif /* EDGE_QKV_H_ */
