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
  std::mutex in_use;  // held by the thread that is in the session; the pool spills others only
  int64_t rows = 0;   // of its cache that count as being in RAM: 0 once they are in a file
};

// Sessions may be used by several threads, each by one at a time; so may the pool.
class SessionPool {
 public:
  // spill: directory for caches that leave RAM; cache_bytes: what all caches may take, 0: no limit.
  SessionPool(std::shared_ptr<const EngineModel> model, std::string spill, uint64_t cache_bytes)
      : model_(std::move(model)), spill_(std::move(spill)), cache_bytes_(cache_bytes) {}

  const std::string& spill_directory() const { return spill_; }

  void add(PooledSession& member);
  void remove(PooledSession& member);  // which no thread is in

  // Before a session that this thread is in changes its cache to `rows` rows, all of which are then in
  // RAM: moves the caches of others to files, the least recently used first, until it fits. Throws Error
  // with EQKV_OVER_BUDGET where it does not because the others are in use.
  void make_room(PooledSession& member, int64_t rows);

  // After the session has forgotten all but `rows` rows, or has them in a file now.
  void forget(PooledSession& member, int64_t rows);

  // Held during an evaluation, and taken before the session is entered: the plan of a budget counts the
  // workspace of one.
  std::unique_lock<std::mutex> take_turn();

  // Leaves sessions that a thread is in alone.
  void trim(eqkv_trim_level level);

 private:
  // Members that no thread is in, in the order of their use, each locked while `visit` is called; until
  // it returns false. mutex_ is held.
  void visit_idle(const PooledSession* except, const std::function<bool(PooledSession&)>& visit);
  void spill(PooledSession& member);

  const std::shared_ptr<const EngineModel> model_;
  const std::string spill_;
  const uint64_t cache_bytes_;
  std::mutex turn_;
  std::mutex mutex_;                   // of what follows, and of the rows of all members
  std::list<PooledSession*> members_;  // the last used at the end
};

}  // namespace edge_qkv
