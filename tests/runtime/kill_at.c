/* Kills the process at one of its calls, to see what a save leaves behind. Loaded by LD_PRELOAD.
 *
 * Counts the calls that change files, from the opening of a name that ends with ".partial" on, and
 * writes the name of each, before it happens, to the file $KILL_LOG. Instead of call number $KILL_AT the
 * process dies by SIGKILL; with $KILL_TORN a write is done by half before. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int started;
static long calls;

static void note(const char* name) {
  const char* path = getenv("KILL_LOG");
  const int log =
      path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  if (log < 0) return;
  syscall(SYS_write, log, name, strlen(name));
  syscall(SYS_write, log, "\n", (size_t)1);
  syscall(SYS_close, log);
}

/* Whether the call that comes is the one to die at. */
static int is_last(const char* name) {
  const char* at = getenv("KILL_AT");
  if (!started) return 0;
  ++calls;
  if (at && calls == atol(at)) return 1;
  note(name);
  return 0;
}

static void die(void) {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

static int ends_with_partial(const char* path) {
  const size_t length = strlen(path);
  return length >= 8 && strcmp(path + length - 8, ".partial") == 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                  \
  int name(const char* path, int flags, ...) {                      \
    va_list rest;                                                   \
    va_start(rest, flags);                                          \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                   \
    if (ends_with_partial(path)) started = 1;                       \
    if (is_last(#name)) die();                                      \
    return REAL(name)(path, flags, mode);                           \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                \
  int name(int at, const char* path, int flags, ...) {              \
    va_list rest;                                                   \
    va_start(rest, flags);                                          \
    const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                   \
    if (ends_with_partial(path)) started = 1;                       \
    if (is_last(#name)) die();                                      \
    return REAL(name)(at, path, flags, mode);                       \
  }
OPENAT(openat)
OPENAT(openat64)

#define PWRITE(name, offset_type)                                            \
  ssize_t name(int fd, const void* data, size_t bytes, offset_type offset) { \
    if (is_last("write")) {                                                  \
      if (getenv("KILL_TORN")) REAL(name)(fd, data, bytes / 2, offset);      \
      die();                                                                 \
    }                                                                        \
    return REAL(name)(fd, data, bytes, offset);                              \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void* data, size_t bytes) {
  if (is_last("write")) {
    if (getenv("KILL_TORN")) REAL(write)(fd, data, bytes / 2);
    die();
  }
  return REAL(write)(fd, data, bytes);
}

ssize_t writev(int fd, const struct iovec* pieces, int count) {
  if (is_last("write")) die();
  return REAL(writev)(fd, pieces, count);
}

#define PLAIN(name, parameters, arguments) \
  int name parameters {                    \
    if (is_last(#name)) die();             \
    return REAL(name) arguments;           \
  }
PLAIN(ftruncate, (int fd, off_t bytes), (fd, bytes))
PLAIN(ftruncate64, (int fd, off64_t bytes), (fd, bytes))
PLAIN(flock, (int fd, int operation), (fd, operation))
PLAIN(fsync, (int fd), (fd))
PLAIN(fdatasync, (int fd), (fd))
PLAIN(rename, (const char* from, const char* to), (from, to))
PLAIN(unlink, (const char* path), (path))
PLAIN(close, (int fd), (fd))
