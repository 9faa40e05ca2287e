// A random attention problem, its float64 reference, and what the tests of the operator need around it.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu.h"

namespace edge_qkv {

inline std::mt19937& rng() {
  static std::mt19937 engine(20240607);
  return engine;
}

// As many threads as asked for, the caller among them.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  ThreadPool handle() {
    return {[](void* self, void (*fn)(void*, size_t), size_t count, void* arg) {
              static_cast<Pool*>(self)->run(fn, count, arg);
            },
            this};
  }

 private:
  void run(void (*fn)(void*, size_t), size_t count, void* arg) {
    std::unique_lock<std::mutex> lock(mutex_);
    fn_ = fn, arg_ = arg, next_ = 0, count_ = count, running_ = count;
    wake_.notify_all();
    pull(lock);
    done_.wait(lock, [this] { return running_ == 0; });
  }
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      pull(lock);
      if (!stop_) wake_.wait(lock, [this] { return stop_ || next_ < count_; });
    }
  }
  void pull(std::unique_lock<std::mutex>& lock) {
    while (next_ < count_) {
      const size_t index = next_++;
      lock.unlock();
      fn_(arg_, index);
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  void (*fn_)(void*, size_t) = nullptr;
  void* arg_ = nullptr;
  size_t next_ = 0, count_ = 0, running_ = 0;
  bool stop_ = false;
};

// A buffer whose neighbourhood is checked. Under AddressSanitizer the buffer ends where the heap block
// ends, so that reads beyond it are found as well.
class Guarded {
 public:
  explicit Guarded(size_t bytes, size_t misalign = 0)
      : bytes_(bytes), misalign_(misalign), data_(misalign + bytes + kGuard, kByte) {}
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.data() + misalign_);
  }
  bool operator==(const Guarded& other) const { return data_ == other.data_; }
  bool intact() const {
    for (size_t i = 0; i < data_.size(); ++i) {
      if ((i < misalign_ || i >= misalign_ + bytes_) && data_[i] != kByte) return false;
    }
    return true;
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t kGuard = 0;
#else
  static constexpr size_t kGuard = 256;
#endif
  static constexpr unsigned char kByte = 0xff;  // read as a float or a half, a NaN
  size_t bytes_, misalign_;
  std::vector<unsigned char> data_;
};

inline double half_value(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

// The half next to x, ties to even, saturating; as a value.
inline double nearest_half(double x) {
  if (std::isnan(x) || x == 0) return x;
  const double step = std::ldexp(1.0, std::max(std::isinf(x) ? 15 : std::ilogb(x), -14) - 10);
  return std::clamp(std::isinf(x) ? x : std::nearbyint(x / step) * step, -65504.0, 65504.0);
}

inline std::vector<float> random_floats(size_t count, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> v(count);
  for (float& x : v) x = normal(rng());
  return v;
}

// A row as an int8 cache holds it, by the definition at CacheType: in float, so that ties fall alike.
struct CodedRow {
  std::vector<int8_t> codes;
  float scale;
};

inline CodedRow nearest_codes(const float* row, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    if (std::fabs(row[i]) > largest) largest = std::fabs(row[i]);
  }
  CodedRow coded{std::vector<int8_t>(count), static_cast<float>(nearest_half(largest / 127.0f))};
  for (int i = 0; i < count; ++i) {
    if (coded.scale == 0 || std::isnan(row[i])) continue;
    coded.codes[i] =
        static_cast<int8_t>(std::clamp(std::nearbyint(row[i] / coded.scale), -127.0f, 127.0f));
  }
  return coded;
}

struct Case {
  int64_t tokens, past;
  int heads, kv_heads, dim;
  Rotary rotary = Rotary::kNone;
  int rotary_dim = 0;
  bool separate = false;
  int64_t batch = 1;
  int64_t window = 0, sinks = 0;
  int value_dim = 0;  // 0: dim
  int rotary_offset = 0;
  bool key_weight = false;
  bool reads = false;  // rows that an earlier layer wrote
};

// A cache of either kind, with rows of `dim` values; `scales` has bytes only where it is int8.
struct CacheBuffers {
  Guarded rows{0}, scales{0};
  int dim = 0;
};

struct Problem {
  AttentionParams p;
  std::vector<float> query, key, value, cos, sin, key_weight;
  CacheBuffers key_cache, value_cache;
  Guarded output{0};

  size_t outputs() const { return p.batch * p.tokens * p.num_heads * p.value_dim; }
  size_t cache_rows() const { return p.batch * p.kv_heads * p.capacity; }
  size_t row_at(int64_t b, int64_t g, int64_t n) const { return (b * p.kv_heads + g) * p.capacity + n; }
  double cached(const CacheBuffers& cache, size_t row, int d) const {
    CacheBuffers& c = const_cast<CacheBuffers&>(cache);
    const size_t i = row * c.dim + d;
    switch (p.cache_type) {
      case CacheType::kFloat32:
        return c.rows.as<float>()[i];
      case CacheType::kFloat16:
        return half_value(c.rows.as<uint16_t>()[i]);
      default:
        return c.rows.as<int8_t>()[i] * half_value(c.scales.as<uint16_t>()[row]);
    }
  }

  // Whether the query at `position` sees row n.
  bool sees(int64_t position, int64_t n) const {
    return n <= position && (p.window == 0 || n < p.sinks || n > position - p.window);
  }

  // Random rows of D values where a query may look, NaN
  // in the rows that nobody has written or nobody sees.
  CacheBuffers new_cache(int D, int64_t rows) {
    const CacheTypeInfo& type = cache_type_info(p.cache_type);
    CacheBuffers cache{Guarded(cache_rows() * D * type.value_bytes),
                       Guarded(cache_rows() * type.scale_bytes), D};
    const std::vector<float> noise = random_floats(rows * D);
    std::vector<float> row(D);
    for (int64_t head = 0; head < p.batch * p.kv_heads; ++head) {
      for (int64_t n = 0; n < rows; ++n) {
        if (n < p.past && !sees(p.past, n)) continue;
        // The same rows for every head, but turned by one value a head.
        for (int d = 0; d < D; ++d) row[d] = noise[(n * D + d + head) % noise.size()];
        const size_t at = head * p.capacity + n;
        if (p.cache_type == CacheType::kFloat32) {
          std::copy(row.begin(), row.end(), cache.rows.as<float>() + at * D);
        } else if (p.cache_type == CacheType::kFloat16) {
          active_kernel().float_to_half(row.data(), cache.rows.as<uint16_t>() + at * D, D);
        } else {
          const CodedRow coded = nearest_codes(row.data(), D);
          std::copy(coded.codes.begin(), coded.codes.end(), cache.rows.as<int8_t>() + at * D);
          active_kernel().float_to_half(&coded.scale, cache.scales.as<uint16_t>() + at, 1);
        }
      }
    }
    return cache;
  }

  Problem(const Case& c, CacheType type) {
    p.batch = c.batch, p.tokens = c.tokens, p.past = c.past, p.capacity = c.past + c.tokens + 5;
    p.num_heads = c.heads, p.kv_heads = c.kv_heads, p.head_dim = c.dim;
    p.value_dim = c.value_dim ? c.value_dim : c.dim, p.rotary_offset = c.rotary_offset;
    p.scale = 1.0f / std::sqrt(static_cast<float>(c.dim));
    p.rotary = c.rotary, p.rotary_dim = c.rotary_dim, p.cache_type = type;
    p.window = c.window, p.sinks = c.sinks;
    query = random_floats(p.batch * p.tokens * p.num_heads * p.head_dim, 2.0f);
    p.query = query.data();
    if (!c.reads) {
      key = random_floats(p.batch * p.tokens * p.kv_heads * p.head_dim), p.key = key.data();
      if (c.separate) {
        value = random_floats(p.batch * p.tokens * p.kv_heads * p.value_dim), p.value = value.data();
      }
    }
    if (c.key_weight) {
      key_weight = random_floats(p.head_dim, 0.3f);
      for (float& w : key_weight) w += 1.0f;
      p.key_weight = key_weight.data();
    }
    if (c.rotary != Rotary::kNone) {
      const int half = c.rotary_dim / 2;
      p.rotary_rows = c.past + c.tokens;
      for (int64_t n = 0; n < p.rotary_rows; ++n) {
        for (int i = 0; i < half; ++i) {
          const double angle = n * std::pow(10000.0, -static_cast<double>(i) / half);
          cos.push_back(static_cast<float>(std::cos(angle)));
          sin.push_back(static_cast<float>(std::sin(angle)));
        }
      }
      p.cos = cos.data(), p.sin = sin.data();
    }
    const int64_t cached_rows = c.past + (c.reads ? c.tokens : 0);
    key_cache = new_cache(p.head_dim, cached_rows);
    p.key_cache = key_cache.rows.as<void>();
    if (c.separate) {
      value_cache = new_cache(p.value_dim, cached_rows), p.value_cache = value_cache.rows.as<void>();
    }
    if (type == CacheType::kInt8) {
      p.key_scales = key_cache.scales.as<uint16_t>();
      if (c.separate) p.value_scales = value_cache.scales.as<uint16_t>();
    }
    output = Guarded(outputs() * sizeof(float));
    p.output = output.as<float>();
  }

  // Runs the operator; false if it wrote outside its buffers, or into rows that are an earlier layer's.
  bool run(size_t tasks, Pool& pool) {
    if (const char* error = attention_error(p)) {
      std::printf("    attention_error: %s\n", error);
      return false;
    }
    Guarded workspace(attention_workspace_bytes(p, tasks), 3);
    const CacheBuffers* const caches[] = {&key_cache, &value_cache};
    CacheBuffers before[2];
    for (int i = 0; i < 2 && !p.key; ++i) before[i] = *caches[i];
    attention(p, workspace.as<void>(), tasks, pool.handle());
    for (int i = 0; i < 2; ++i) {
      const CacheBuffers& now = *caches[i];
      if (!now.rows.intact() || !now.scales.intact()) return false;
      if (!p.key && !(now.rows == before[i].rows && now.scales == before[i].scales)) return false;
    }
    return workspace.intact() && output.intact();
  }

  // `row` turned by the angles of `position`, back where direction is -1; in float64 from the tables.
  void rotate(double* row, int64_t position, int direction) const {
    const int half = p.rotary_dim / 2;
    row += p.rotary_offset;
    for (int i = 0; i < half; ++i) {
      const double c = p.cos[position * half + i], s = direction * p.sin[position * half + i];
      const double a = row[i], b = row[i + half];
      row[i] = a * c - b * s, row[i + half] = a * s + b * c;
    }
  }

  std::vector<double> cache_row(const CacheBuffers& cache, int64_t b, int64_t g, int64_t n) const {
    std::vector<double> row(cache.dim);
    for (int d = 0; d < cache.dim; ++d) row[d] = cached(cache, row_at(b, g, n), d);
    return row;
  }

  // Whether the cache has exactly the codes and scale of `in` for row n.
  bool has_codes(const CacheBuffers& cache, size_t row, const float* in) const {
    CacheBuffers& c = const_cast<CacheBuffers&>(cache);
    const CodedRow want = nearest_codes(in, c.dim);
    return half_value(c.scales.as<uint16_t>()[row]) == want.scale &&
           std::equal(want.codes.begin(), want.codes.end(), c.rows.as<int8_t>() + row * c.dim);
  }

  // Whether the new rows are what was given, rotated where they should be, up to rounding; and whether
  // every row after them is still unwritten. `run` has compared what may not be written at all.
  bool rows_written() const {
    if (!p.key) return true;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t g = 0; g < p.kv_heads; ++g) {
        for (int64_t n = p.past; n < p.capacity; ++n) {
          for (int which = 0; which < (p.value ? 2 : 1); ++which) {
            const CacheBuffers& cache = which ? value_cache : key_cache;
            const std::vector<double> got = cache_row(cache, b, g, n);
            if (n >= p.past + p.tokens) {
              for (double x : got) {
                if (!std::isnan(x)) return false;
              }
              continue;
            }
            const float* in =
                (which ? p.value : p.key) + ((b * p.tokens + n - p.past) * p.kv_heads + g) * cache.dim;
            const bool rotated = p.rotary == Rotary::kConjugate && which == 0;
            if (p.cache_type == CacheType::kInt8 && !rotated) {
              if (!has_codes(cache, row_at(b, g, n), in)) return false;
              continue;
            }
            std::vector<double> want(in, in + cache.dim);
            if (rotated) rotate(want.data(), n, 1);
            double largest = 0;
            for (double x : want) largest = std::max(largest, std::fabs(x));
            for (int d = 0; d < cache.dim; ++d) {
              // The unit of a float type is relative to the value. Codes are half a step from it at
              // most, a step being a 127th of the row's largest value and its own rounding to fp16.
              const double unit =
                  p.cache_type == CacheType::kFloat32   ? std::ldexp(std::fabs(want[d]), -23)
                  : p.cache_type == CacheType::kFloat16 ? std::ldexp(std::fabs(want[d]), -11)
                                                        : largest / 127 / 2 * (1 + std::ldexp(1.0, -10));
              // A rotated value is a difference of products: its fp32 rounding is absolute.
              if (!(std::fabs(got[d] - want[d]) <= unit + 1e-6)) return false;
            }
          }
        }
      }
    }
    return true;
  }

  // The largest error relative to the largest |reference| value of its token,
  // over all heads (the row that the output projection multiplies; a head of one
  // value may cancel to nothing, where a relative error means nothing). Reads the
  // rows from the cache, so that the rounding of stored rows is no part of it.
  double error() const {
    const int D = p.head_dim, V = p.value_dim, group = p.num_heads / p.kv_heads;
    const bool separate = p.value_cache != nullptr;
    const int64_t rows = p.past + p.tokens;
    std::vector<double> reference(outputs());
    std::vector<double> keys(D * rows), values(rows * V), weight(rows), q(D);  // keys: [D, rows]
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t g = 0; g < p.kv_heads; ++g) {
        for (int64_t n = 0; n < rows; ++n) {
          std::vector<double> key_row = cache_row(key_cache, b, g, n);
          const std::vector<double> value_row = separate ? cache_row(value_cache, b, g, n) : key_row;
          for (int d = 0; p.key_weight && d < D; ++d) key_row[d] *= p.key_weight[d];
          if (p.rotary == Rotary::kOnRead) rotate(key_row.data(), n, 1);
          for (int d = 0; d < D; ++d) keys[d * rows + n] = key_row[d];
          std::copy(value_row.begin(), value_row.begin() + V, &values[n * V]);
        }
        for (int64_t t = 0; t < p.tokens; ++t) {
          const int64_t position = p.past + t;
          for (int h = 0; h < group; ++h) {
            const size_t head = (b * p.tokens + t) * p.num_heads + g * group + h;
            std::copy(&p.query[head * D], &p.query[head * D] + D, q.begin());
            if (p.rotary != Rotary::kNone) rotate(q.data(), position, 1);
            double top = -INFINITY, sum = 0;
            std::fill(weight.begin(), weight.end(), 0.0);
            for (int d = 0; d < D; ++d) {
              const double factor = q[d] * p.scale;
              for (int64_t n = 0; n <= position; ++n) weight[n] += factor * keys[d * rows + n];
            }
            for (int64_t n = 0; n < rows; ++n) {
              if (!sees(position, n)) weight[n] = -INFINITY;  // and NaN before
              top = std::max(top, weight[n]);
            }
            for (double& w : weight) {
              if (w != -INFINITY) sum += w = std::exp(w - top);
            }
            double* out = &reference[head * V];
            for (int64_t n = 0; n < rows; ++n) {
              if (weight[n] == -INFINITY) continue;  // its row may be NaN
              for (int d = 0; d < V; ++d) out[d] += weight[n] / sum * values[n * V + d];
            }
            if (p.rotary == Rotary::kConjugate && !separate && p.rotary_offset < V) {
              rotate(out, position, -1);
            }
          }
        }
      }
    }
    double worst = 0;
    const int64_t width = static_cast<int64_t>(p.num_heads) * V;
    for (int64_t token = 0; token < p.batch * p.tokens; ++token) {
      double largest = 0, difference = 0;
      for (int64_t i = token * width; i < (token + 1) * width; ++i) {
        if (!std::isfinite(p.output[i])) return INFINITY;
        largest = std::max(largest, std::fabs(reference[i]));
        difference = std::max(difference, std::fabs(p.output[i] - reference[i]));
      }
      worst = std::max(worst, difference / largest);
    }
    return worst;
  }
};

}  // namespace edge_qkv
