#include "session.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "snapshot.h"

namespace edge_qkv {
namespace {

int64_t checked_context(int64_t context, int64_t max_positions) {
  if (context <= 0) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "The context must be at least 1 token, not " + std::to_string(context) + ".");
  }
  if (context > max_positions) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "A context of " + std::to_string(context) +
                    " tokens is more than the model's positions allow; ask for at most " +
                    std::to_string(max_positions) + ".");
  }
  return context;
}

int64_t checked_chunk(int64_t chunk, int64_t most, int64_t context) {
  if (chunk < 0) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "The prefill chunk must be 0 (the default) or more, not " + std::to_string(chunk) + ".");
  }
  return chunk_tokens(chunk, most, context);
}

SessionOptions checked(SessionOptions options, const ModelInfo& model) {
  options.context = checked_context(options.context, model.max_positions);
  options.prefill_chunk = checked_chunk(options.prefill_chunk, model.prefill_chunk, options.context);
  return options;
}

}  // namespace

Session::Session(std::shared_ptr<const EngineModel> model, const SessionOptions& options)
    : model_(std::move(model)),
      options_(checked(options, model_->info())),
      overflow_(options_.overflow, model_->info(), options_.context),
      memory_(model_->info().cache, options_.context, model_->info().cache_rows),
      state_(model_->open(memory_.view())),
      logits_(static_cast<size_t>(model_->info().vocab_size)) {}

void Session::evaluate(const int32_t* tokens, size_t count, float* logits) {
  if (!overflow_.drops()) check_fits(count);
  check_vocabulary(tokens, count);
  stop_if_cancelled();
  const size_t vocab = logits_.size();
  const int64_t most = std::min(options_.prefill_chunk, overflow_.most_tokens());
  for (size_t done = 0; done < count;) {
    const size_t chunk = std::min(count - done, static_cast<size_t>(most));
    make_room(static_cast<int64_t>(chunk));
    forward(tokens + done, chunk, logits ? logits + done * vocab : nullptr);
    done += chunk;
    if (done < count) stop_if_cancelled();
  }
}

// One chunk. Even of a chunk in the middle the last logits are computed, so that they are there when the
// next one is cancelled or fails; that is one row of the head, beside a whole chunk of layers.
void Session::forward(const int32_t* tokens, size_t count, float* logits) {
  const size_t before = tokens_.size();
  next_logits_.resize(logits_.size());  // first: these may run out of memory
  tokens_.insert(tokens_.end(), tokens, tokens + count);
  try {
    state_->forward(tokens, count, static_cast<int64_t>(before), logits ? count : 1,
                    logits ? logits : next_logits_.data());
  } catch (...) {
    tokens_.resize(before);
    stop_if_cancelled();  // the reason, where the engine was interrupted
    throw;
  }
  if (logits) {
    std::copy_n(logits + (count - 1) * logits_.size(), logits_.size(), logits_.begin());
  } else {
    logits_.swap(next_logits_);
  }
  has_logits_ = true;
}

void Session::make_room(int64_t more) {
  const auto [first, last] = overflow_.rows_to_drop(length(), more);
  if (first == last) return;
  const int64_t left = length() - (last - first);
  memory_.changed_from(first);
  drop_rows(memory_.view(), model(), first, last, length());
  tokens_.erase(tokens_.begin() + first, tokens_.begin() + last);
  has_logits_ = has_logits_ && left > 0;
  dropped_ += last - first;
  memory_.release(left);
}

void Session::release_workspace() { std::vector<float>().swap(next_logits_); }

const float* Session::logits() const {
  if (!has_logits_) {
    throw Error(EQKV_INVALID_ARGUMENT, "The session has no logits here; evaluate a token first.");
  }
  return logits_.data();
}

int32_t Session::sample() { return sampler_.sample(logits(), logits_.size(), tokens_); }

void Session::rewind(int64_t length) {
  if (length < 0 || length > this->length()) {
    throw Error(EQKV_INVALID_ARGUMENT, "Cannot rewind to " + std::to_string(length) +
                                           " tokens; the session holds " +
                                           std::to_string(this->length()) + ".");
  }
  if (length == this->length()) return;
  tokens_.resize(static_cast<size_t>(length));
  has_logits_ = false;
  memory_.release(length);
}

int64_t Session::match(const int32_t* tokens, size_t count) {
  const size_t most = std::min(count, tokens_.size());
  size_t kept =
      static_cast<size_t>(std::mismatch(tokens, tokens + most, tokens_.begin()).first - tokens);
  const bool finished = kept == tokens_.size() && has_logits_;
  if (kept == count && kept > 0 && !finished) --kept;  // so that its logits are computed
  rewind(static_cast<int64_t>(kept));
  return static_cast<int64_t>(kept);
}

std::unique_ptr<Session> Session::fork(const std::string& directory) {
  auto child = std::make_unique<Session>(model_, options_);
  child->tokens_ = tokens_;
  child->logits_ = logits_;
  child->has_logits_ = has_logits_;
  if (length() == 0) return child;
  try {
    spill(directory);
  } catch (const Error&) {
    spill("");  // in memory it takes no more than it did
  }
  child->memory_.map(memory_.file(), length());
  return child;
}

void Session::save(const std::string& path) const {
  save_snapshot(path, model(), memory_.view(), tokens_, has_logits_ ? logits_.data() : nullptr);
}

void Session::restore(const std::string& path) {
  Snapshot snapshot = open_snapshot(path, model(), context());
  try {
    memory_.map(std::move(snapshot.rows), static_cast<int64_t>(snapshot.tokens.size()));
  } catch (const Error& error) {
    tokens_.clear();
    has_logits_ = false;
    throw Error(error.status(), error.what() + std::string(" The session is empty now."));
  }
  tokens_.swap(snapshot.tokens);
  has_logits_ = !snapshot.logits.empty();
  if (has_logits_) logits_.swap(snapshot.logits);
}

void Session::fill(int64_t length, uint64_t seed) {
  if (length < this->length()) {
    throw Error(EQKV_INVALID_ARGUMENT, "Cannot fill up to " + std::to_string(length) +
                                           " tokens; the session already holds " +
                                           std::to_string(this->length()) + ".");
  }
  if (length == this->length()) return;
  const int64_t begin = this->length();
  check_fits(static_cast<uint64_t>(length - begin));
  tokens_.resize(static_cast<size_t>(length), 0);
  has_logits_ = false;
  fill_with_noise(memory_.view(), begin, length, seed);
}

void Session::cancel() {
  const std::lock_guard<std::mutex> lock(cancel_mutex_);
  cancelled_ = true;
  state_->interrupt();
}

void Session::stop_if_cancelled() {
  const std::lock_guard<std::mutex> lock(cancel_mutex_);
  if (!cancelled_) return;
  cancelled_ = false;
  state_->resume();
  throw Error(EQKV_CANCELLED, "The evaluation was cancelled after " + std::to_string(length()) +
                                  " tokens of the session; evaluate again to go on.");
}

void Session::check_fits(uint64_t more) const {
  const uint64_t left = static_cast<uint64_t>(context() - length());
  if (more <= left) return;
  throw Error(
      EQKV_CONTEXT_FULL,
      std::to_string(more) + " more tokens do not fit: " + std::to_string(length()) + " of the " +
          std::to_string(context()) +
          " tokens of the context are in use; rewind the session or open one with a larger context.");
}

void Session::check_vocabulary(const int32_t* tokens, size_t count) const {
  for (size_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= logits_.size()) {
      throw Error(EQKV_INVALID_ARGUMENT, "Token " + std::to_string(tokens[i]) + " at position " +
                                             std::to_string(i) +
                                             " is outside the model's vocabulary of " +
                                             std::to_string(logits_.size()) + " tokens.");
    }
  }
}

}  // namespace edge_qkv
