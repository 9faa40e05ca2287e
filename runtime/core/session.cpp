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

int64_t checked_margin(int64_t margin, int64_t context) {
  if (margin < 0) {
    throw Error(EQKV_INVALID_ARGUMENT,
                "The margin must be 0 (as many rows as the window) or more, not " +
                    std::to_string(margin) + ".");
  }
  return std::min(margin, context);
}

SessionOptions checked(SessionOptions options, const Description& model) {
  options.context = checked_context(options.context, model.max_positions);
  options.prefill_chunk = checked_chunk(options.prefill_chunk, model.prefill_chunk, options.context);
  options.margin = checked_margin(options.margin, options.context);
  return options;
}

}  // namespace

Session::Session(std::shared_ptr<const EngineModel> model, const SessionOptions& options)
    : model_(std::move(model)),
      options_(checked(options, model_->info().description)),
      overflow_(options_.overflow, model_->info(), options_.context),
      memory_(model_->info().layout, options_.context, model_->info().description.cache_rows,
              options_.margin),
      state_(model_->open(memory_.view())),
      logits_(static_cast<size_t>(model_->info().description.vocab_size)) {}

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
  memory_.grow_to(length());
}

void Session::evaluate_again(int64_t length, const Progress& progress) {
  const std::vector<int32_t> again(tokens_.begin(), tokens_.begin() + length);
  tokens_.clear();
  has_logits_ = false;
  memory_.release(0);
  for (int64_t done = 0; done < length; done = this->length()) {
    if (done > 0) stop_if_cancelled();
    forward(again.data() + done, static_cast<size_t>(std::min(options_.prefill_chunk, length - done)),
            nullptr);
    if (progress) progress(this->length(), length);
  }
}

void Session::make_room(int64_t more) {
  const RowSpan dropped = overflow_.rows_to_drop(length(), more);
  if (dropped.begin == dropped.end) return;
  const int64_t left = length() - (dropped.end - dropped.begin);
  const bool moves = memory_.drops(dropped.begin, dropped.end, length());
  if (moves) drop_rows(memory_, model().description, dropped, length());
  tokens_.erase(tokens_.begin() + dropped.begin, tokens_.begin() + dropped.end);
  has_logits_ = has_logits_ && left > 0;
  dropped_ += dropped.end - dropped.begin;
  if (!moves) evaluate_again(left, nullptr);
}

void Session::release_workspace() { std::vector<float>().swap(next_logits_); }

const float* Session::logits() const {
  if (!has_logits_) {
    throw Error(EQKV_INVALID_ARGUMENT, "The session has no logits here; evaluate a token first.");
  }
  return logits_.data();
}

int32_t Session::sample() { return sampler_.sample(logits(), logits_.size(), tokens_); }

int64_t Session::rewind(int64_t length, const Progress& progress) {
  if (length < 0 || length > this->length()) {
    throw Error(EQKV_INVALID_ARGUMENT, "Cannot rewind to " + std::to_string(length) +
                                           " tokens; the session holds " +
                                           std::to_string(this->length()) + ".");
  }
  if (length == this->length()) return 0;
  if (!can_go_back_to(length)) {
    stop_if_cancelled();
    evaluate_again(length, progress);
    return length;
  }
  tokens_.resize(static_cast<size_t>(length));
  has_logits_ = false;
  memory_.release(length);
  return 0;
}

int64_t Session::match(const int32_t* tokens, size_t count) {
  const size_t most = std::min(count, tokens_.size());
  size_t kept =
      static_cast<size_t>(std::mismatch(tokens, tokens + most, tokens_.begin()).first - tokens);
  const bool finished = kept == tokens_.size() && has_logits_;
  if (kept == count && kept > 0 && !finished) --kept;  // so that its logits are computed
  if (!can_go_back_to(static_cast<int64_t>(kept))) kept = 0;
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
  child->memory_.map(memory_.file(), length(), memory_.first_live());
  return child;
}

void Session::save(const std::string& path) const {
  save_snapshot(path, model(), memory_, tokens_, has_logits_ ? logits_.data() : nullptr);
}

void Session::restore(const std::string& path) {
  Snapshot snapshot = open_snapshot(path, model(), context());
  try {
    memory_.map(std::move(snapshot.rows), static_cast<int64_t>(snapshot.tokens.size()),
                snapshot.first_live);
  } catch (const Error& error) {
    tokens_.clear();
    has_logits_ = false;
    throw Error(error.status(), error.what() + std::string(" The session is empty now."));
  }
  tokens_.swap(snapshot.tokens);
  has_logits_ = !snapshot.logits.empty();
  if (has_logits_) logits_.swap(snapshot.logits);
  memory_.grow_to(length());  // to the margin of this session
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
  memory_.grow_to(length);
  for (size_t tensor = 0; tensor < memory_.view().tensors.size(); ++tensor) {
    for (const RowSpan& rows : memory_.live(tensor, begin, length)) {
      fill_with_noise(memory_.view(), tensor, rows.begin, rows.end, seed);
    }
  }
}

uint64_t Session::cache_bytes(int64_t length) const {
  return resident_bytes(model().layout, length, options_.margin, options_.prefill_chunk);
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
