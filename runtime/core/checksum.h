// XXH64: tells a damaged file from a whole one at the
// speed of memory. No protection against an attacker.
//
// Written from the specification by Yann Collet,
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, for little-endian hosts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace edge_qkv {

class Checksum {
 public:
  explicit Checksum(uint64_t seed = 0) : seed_(seed) {}

  // The sum of pieces is that of the bytes in a row, however they are cut.
  void add(const void* data, size_t bytes) {
    if (bytes == 0) return;  // of nothing, which may be null
    const auto* at = static_cast<const unsigned char*>(data);
    const size_t held = total_ % kStripe;
    total_ += bytes;
    if (held > 0) {
      const size_t taken = std::min(bytes, kStripe - held);
      std::memcpy(rest_ + held, at, taken);
      at += taken;
      bytes -= taken;
      if (held + taken < kStripe) return;
      mix(rest_, 1);
    }
    mix(at, bytes / kStripe);
    if (bytes % kStripe > 0) std::memcpy(rest_, at + bytes / kStripe * kStripe, bytes % kStripe);
  }

  uint64_t value() const {
    uint64_t sum = seed_ + kPrime5;
    if (total_ >= kStripe) {
      sum = rotate(lanes_[0], 1) + rotate(lanes_[1], 7) + rotate(lanes_[2], 12) + rotate(lanes_[3], 18);
      for (const uint64_t lane : lanes_) sum = (sum ^ round(0, lane)) * kPrime1 + kPrime4;
    }
    sum += total_;
    const unsigned char* at = rest_;
    size_t left = total_ % kStripe;
    for (; left >= 8; left -= 8, at += 8) {
      sum = rotate(sum ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
    }
    if (left >= 4) {
      sum = rotate(sum ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
      left -= 4;
      at += 4;
    }
    for (; left > 0; --left, ++at) sum = rotate(sum ^ *at * kPrime5, 11) * kPrime1;
    sum = (sum ^ sum >> 33) * kPrime2;
    sum = (sum ^ sum >> 29) * kPrime3;
    return sum ^ sum >> 32;
  }

 private:
  static constexpr size_t kStripe = 32;
  static constexpr uint64_t kPrime1 = 0x9e3779b185ebca87u, kPrime2 = 0xc2b2ae3d27d4eb4fu,
                            kPrime3 = 0x165667b19e3779f9u, kPrime4 = 0x85ebca77c2b2ae63u,
                            kPrime5 = 0x27d4eb2f165667c5u;

  static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }
  static uint64_t round(uint64_t lane, uint64_t input) {
    return rotate(lane + input * kPrime2, 31) * kPrime1;
  }
  template <class Integer>
  static uint64_t read(const unsigned char* at) {
    Integer value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }

  void mix(const unsigned char* at, size_t stripes) {
    uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];  // in registers
    for (; stripes > 0; --stripes, at += kStripe) {
      a = round(a, read<uint64_t>(at));
      b = round(b, read<uint64_t>(at + 8));
      c = round(c, read<uint64_t>(at + 16));
      d = round(d, read<uint64_t>(at + 24));
    }
    lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
  }

  uint64_t seed_;
  uint64_t total_ = 0;  // bytes so far
  uint64_t lanes_[4] = {seed_ + kPrime1 + kPrime2, seed_ + kPrime2, seed_, seed_ - kPrime1};
  unsigned char rest_[kStripe] = {};  // of a stripe that is not full yet
};

}  // namespace edge_qkv
