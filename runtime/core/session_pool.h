// The sessions of one model: how they share its memory budget, and what they give up under pressure.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "edge_qkv.h"
#include "session.h"

namespace edge_qkv {

// A session as its pool sees it.
struct PooledSession {
  explicit PooledSession(std::unique_ptr<Session> opened) : session(std::move(opened)) {}

  const std::unique_ptr<Session> session;
  std::mutex in_use;  // held by the thread that is in the session
  int64_t rows = 0;   // of its cache that count as being in RAM: 0 once they are in a file
};

// Sessions may be used by several threads, each by one at a time; so may the pool.
//
// Order of locks: the turn, then a session's in_use, then the pool's own. Who holds the pool's never
// waits for a session.
class SessionPool {
 public:
  using Member = std::shared_ptr<PooledSession>;

  // spill: directory for caches that leave RAM; cache_bytes: what the caches of all sessions may take,
  // and their other buffers but those of one; 0: no limit.
  SessionPool(std::shared_ptr<const EngineModel> model, std::string spill, uint64_t cache_bytes)
      : model_(std::move(model)), spill_(std::move(spill)), cache_bytes_(cache_bytes) {}

  const std::string& spill_directory() const { return spill_; }

  void add(const Member& member);
  void remove(const Member& member);

  // Held during an evaluation: the plan of a budget counts the workspace of one.
  std::unique_lock<std::mutex> take_turn();

  // Before a session that this thread is in has `rows` rows in RAM: moves the caches of others to files,
  // the least recently used first, until it fits. With a budget the thread has the turn, so that others
  // are in their sessions for moments only: it waits for them. Throws Error, with EQKV_OVER_BUDGET where
  // there are too many sessions for the budget.
  void make_room(const Member& member, int64_t rows);

  // After a call: how many rows of the session are in RAM.
  void settle(const Member& member, int64_t rows);

  // Leaves sessions that a thread is in alone.
  void trim(eqkv_trim_level level);

 private:
  uint64_t bytes_in_ram() const;                           // mutex_ is held
  Member least_recently_used(const Member& except) const;  // with rows, or null; mutex_ is held

  const std::shared_ptr<const EngineModel> model_;
  const std::string spill_;
  const uint64_t cache_bytes_;
  std::mutex turn_;
  mutable std::mutex mutex_;   // of what follows, and of the rows of all members
  std::list<Member> members_;  // the last used at the end
};

}  // namespace edge_qkv
