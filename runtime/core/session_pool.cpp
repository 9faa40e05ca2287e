#include "session_pool.h"

#include <algorithm>
#include <exception>
#include <string>

#include "error.h"
#include "memory.h"

namespace edge_qkv {

void SessionPool::add(PooledSession& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back(&member);
}

void SessionPool::remove(PooledSession& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.remove(&member);
}

void SessionPool::make_room(PooledSession& member, int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The list is kept in the order of use, the last used at its end.
  members_.remove(&member);
  members_.push_back(&member);
  member.rows = rows;
  if (cache_bytes_ == 0) return;
  const auto token_bytes = static_cast<uint64_t>(model_->info().cache.token_bytes());
  uint64_t used = 0;
  for (const PooledSession* other : members_) used += static_cast<uint64_t>(other->rows) * token_bytes;
  visit_idle(&member, [&](PooledSession& other) {
    if (used <= cache_bytes_) return false;
    if (other.rows > 0) {
      used -= static_cast<uint64_t>(other.rows) * token_bytes;
      spill(other);
    }
    return true;
  });
  if (used <= cache_bytes_) return;
  throw Error(EQKV_OVER_BUDGET,
              "The caches of the sessions in use need " + std::to_string(used) +
                  " bytes, of which the model's memory budget holds " + std::to_string(cache_bytes_) +
                  "; close a session, rewind one, or open the model with a larger budget.");
}

void SessionPool::forget(PooledSession& member, int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  member.rows = std::min(member.rows, rows);
}

std::unique_lock<std::mutex> SessionPool::take_turn() {
  return cache_bytes_ > 0 ? std::unique_lock<std::mutex>(turn_) : std::unique_lock<std::mutex>();
}

void SessionPool::trim(eqkv_trim_level level) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const PooledSession* last = members_.empty() ? nullptr : members_.back();
  std::exception_ptr failure;  // one cache that cannot be moved does not keep the others
  visit_idle(nullptr, [&](PooledSession& member) {
    member.session->release_workspace();
    if (member.rows > 0 && (level == EQKV_TRIM_ALL || (level == EQKV_TRIM_IDLE && &member != last))) {
      try {
        spill(member);
      } catch (...) {
        failure = std::current_exception();
      }
    }
    return true;
  });
  if (level == EQKV_TRIM_ALL) model_->release_pages();
  release_heap();
  if (failure) std::rethrow_exception(failure);
}

void SessionPool::visit_idle(const PooledSession* except,
                             const std::function<bool(PooledSession&)>& visit) {
  for (PooledSession* member : members_) {
    if (member == except) continue;
    const std::unique_lock<std::mutex> lock(member->in_use, std::try_to_lock);
    if (lock && !visit(*member)) return;
  }
}

void SessionPool::spill(PooledSession& member) {
  member.session->spill(spill_);
  member.rows = 0;
}

}  // namespace edge_qkv
