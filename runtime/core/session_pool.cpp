#include "session_pool.h"

#include <algorithm>
#include <exception>
#include <string>

#include "error.h"
#include "memory.h"

namespace edge_qkv {

void SessionPool::add(const Member& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.push_back(member);
}

void SessionPool::remove(const Member& member) {
  const std::lock_guard<std::mutex> lock(mutex_);
  members_.remove(member);
}

std::unique_lock<std::mutex> SessionPool::take_turn() {
  return cache_bytes_ > 0 ? std::unique_lock<std::mutex>(turn_) : std::unique_lock<std::mutex>();
}

void SessionPool::make_room(const Member& member, int64_t rows) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto at = std::find(members_.begin(), members_.end(), member);
  if (at != members_.end()) members_.splice(members_.end(), members_, at);
  member->rows = rows;
  while (cache_bytes_ > 0 && bytes_in_ram() > cache_bytes_) {
    const Member victim = least_recently_used(member);
    if (!victim) {
      throw Error(EQKV_OVER_BUDGET, "The model's memory budget holds " + std::to_string(cache_bytes_) +
                                        " bytes of caches, and " + std::to_string(members_.size()) +
                                        " sessions need " + std::to_string(bytes_in_ram()) +
                                        "; close some, rewind this one, or open the model with a "
                                        "larger budget.");
    }
    lock.unlock();
    const std::lock_guard<std::mutex> in_use(victim->in_use);
    lock.lock();
    if (victim->rows > 0) victim->session->spill(spill_);  // unless it was trimmed meanwhile
    victim->rows = 0;
  }
}

void SessionPool::settle(const Member& member, int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  member->rows = rows;
}

void SessionPool::trim(eqkv_trim_level level) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::exception_ptr failure;  // one cache that cannot be moved does not keep the others
  for (const Member& member : members_) {
    const std::unique_lock<std::mutex> in_use(member->in_use, std::try_to_lock);
    if (!in_use) continue;
    member->session->release_workspace();
    const bool spill = level == EQKV_TRIM_ALL || (level == EQKV_TRIM_IDLE && member != members_.back());
    if (!spill || member->session->length() == 0) continue;
    try {
      member->session->spill(spill_);
      member->rows = 0;
    } catch (...) {
      failure = std::current_exception();
    }
  }
  model_->release_workspace();
  if (level == EQKV_TRIM_ALL) model_->release_pages();
  release_heap();
  if (failure) std::rethrow_exception(failure);
}

// In whole pages; a session has two rows of logits besides, of which the plan counts those of one.
uint64_t SessionPool::bytes_in_ram() const {
  const uint64_t logits = sizeof(float) * static_cast<uint64_t>(model_->info().description.vocab_size);
  uint64_t bytes = (members_.size() - 1) * 2 * logits;
  for (const Member& member : members_) bytes += member->session->cache_bytes(member->rows);
  return bytes;
}

SessionPool::Member SessionPool::least_recently_used(const Member& except) const {
  const auto found = std::find_if(members_.begin(), members_.end(), [&](const Member& member) {
    return member != except && member->rows > 0;
  });
  return found == members_.end() ? nullptr : *found;
}

}  // namespace edge_qkv
