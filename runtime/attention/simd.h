// Vectors for kernel.cpp, on top of the vector extensions of GCC and Clang. Included only
// there: everything lands in the namespace of the instruction set being compiled, EDGE_QKV_ISA.
//
// No header of the C++ library may be included here, see kernel.h.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define EDGE_QKV_INLINE static inline __attribute__((always_inline))

namespace edge_qkv {
namespace EDGE_QKV_ISA {

// kLanes is the widest vector; kWideFile says that there are 32 vector registers rather than 16.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr bool kWideFile = true;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr bool kWideFile = false;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr bool kWideFile = true;
#else
constexpr int kLanes = 4;
constexpr bool kWideFile = false;
#endif

// Vectors of L lanes. Narrower ones than kLanes serve blocks of few query rows.
template <int L>
struct Simd {
  typedef float Float __attribute__((vector_size(L * 4)));
  typedef int32_t Int __attribute__((vector_size(L * 4)));
  typedef uint32_t Bits __attribute__((vector_size(L * 4)));
  typedef uint16_t Half __attribute__((vector_size(L * 2)));
  typedef int8_t Code __attribute__((vector_size(L)));
};
template <int L>
using Float = typename Simd<L>::Float;
template <int L>
using Int = typename Simd<L>::Int;
template <int L>
using Bits = typename Simd<L>::Bits;

template <int L>
EDGE_QKV_INLINE Float<L> load(const float* p) {
  Float<L> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <int L>
EDGE_QKV_INLINE Int<L> load(const int32_t* p) {
  Int<L> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <int L>
EDGE_QKV_INLINE Bits<L> load(const uint32_t* p) {
  Bits<L> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <int L>
EDGE_QKV_INLINE void store(float* p, Float<L> v) {
  memcpy(p, &v, sizeof v);
}

template <int L>
EDGE_QKV_INLINE void store(uint32_t* p, Bits<L> v) {
  memcpy(p, &v, sizeof v);
}

// x - 0 is x for every x, so this is one broadcast; x + 0 would not be for x = -0.
template <int L>
EDGE_QKV_INLINE Float<L> splat(float x) {
  return x - Float<L>{};
}

template <int L>
EDGE_QKV_INLINE Int<L> splat(int32_t x) {
  return x - Int<L>{};
}

template <int L>
EDGE_QKV_INLINE Bits<L> splat(uint32_t x) {
  return x - Bits<L>{};
}

// Sum of the lanes' halves, down to four lanes.
EDGE_QKV_INLINE Float<4> fold(Float<4> v) { return v; }
#if defined(__AVX2__)
EDGE_QKV_INLINE Float<4> fold(Float<8> v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}
#endif
#if defined(__AVX512F__)
EDGE_QKV_INLINE Float<4> fold(Float<16> v) {
  return fold(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}
#endif

// The largest lane, of lanes of which none is NaN.
EDGE_QKV_INLINE float largest_lane(Float<4> v) {
  const Float<4> swapped = __builtin_shufflevector(v, v, 2, 3, 0, 1);
  v = v > swapped ? v : swapped;
  return v[0] > v[1] ? v[0] : v[1];
}
#if defined(__AVX2__)
EDGE_QKV_INLINE float largest_lane(Float<8> v) {
  const Float<4> low = __builtin_shufflevector(v, v, 0, 1, 2, 3);
  const Float<4> high = __builtin_shufflevector(v, v, 4, 5, 6, 7);
  return largest_lane(low > high ? low : high);
}
#endif
#if defined(__AVX512F__)
EDGE_QKV_INLINE float largest_lane(Float<16> v) {
  const Float<8> low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  const Float<8> high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return largest_lane(low > high ? low : high);
}
#endif

// Lane i of the result is the sum of the lanes of the i-th argument.
EDGE_QKV_INLINE Float<4> sum_lanes(Float<4> a, Float<4> b, Float<4> c, Float<4> d) {
  const Float<4> ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Float<4> cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// 2^x for x <= 0, relative error below 1.2e-7. Below 2^-126 the result is 0: weights that small vanish
// beside the largest, which is 1. NaN gives NaN.
template <int L>
EDGE_QKV_INLINE Float<L> exp2_nonpositive(Float<L> x) {
  // Adding 1.5 * 2^23 leaves round(x) in the low mantissa bits.
  const float kRound = 12582912.0f;
  const Float<L> shifted = x + kRound;
  const Float<L> r = x - (shifted - kRound);  // in [-0.5, 0.5]
  // Minimax polynomial of degree 6 for the relative error of 2^r, constant term fixed at 1; error 2e-9.
  Float<L> p = splat<L>(1.53533620e-4f);
  p = p * r + 1.33988739e-3f;
  p = p * r + 9.61843692e-3f;
  p = p * r + 5.55033237e-2f;
  p = p * r + 2.40226477e-1f;
  p = p * r + 6.93147182e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__)
  if constexpr (L == 16) {
    // The form with a mask, for GCC warns of an uninitialised operand in its own header's plain one.
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Float<16>)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)(shifted - kRound));
  }
#endif
  const Float<L> scaled = (Float<L>)((Bits<L>)p + ((Bits<L>)shifted << 23));
  return x < -126.0f ? Float<L>{} : scaled;
}

// Half precision. Values beyond the largest half, 65504, saturate when written: an infinity in a cached
// row would turn every later score into NaN, a slightly too small value does not. Infinities saturate
// with them; NaN stays NaN.

template <int L>
EDGE_QKV_INLINE Float<L> saturate_to_half(Float<L> v) {
  v = v > 65504.0f ? splat<L>(65504.0f) : v;
  return v < -65504.0f ? splat<L>(-65504.0f) : v;
}

#if defined(__AVX512F__)

// The forms with a mask, for GCC warns of an uninitialised operand in its own header's plain ones.
EDGE_QKV_INLINE Float<16> from_half(const uint16_t* p) {
  return (Float<16>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)p));
}
EDGE_QKV_INLINE void to_half(uint16_t* p, Float<16> v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_maskz_cvtps_ph(0xffff, (__m512)saturate_to_half<16>(v),
                                                         _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__F16C__)

EDGE_QKV_INLINE Float<8> from_half(const uint16_t* p) {
  return (Float<8>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
EDGE_QKV_INLINE void to_half(uint16_t* p, Float<8> v) {
  _mm_storeu_si128((__m128i*)p,
                   _mm256_cvtps_ph((__m256)saturate_to_half<8>(v), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__aarch64__)

EDGE_QKV_INLINE Float<4> from_half(const uint16_t* p) {
  return (Float<4>)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
EDGE_QKV_INLINE void to_half(uint16_t* p, Float<4> v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)saturate_to_half<4>(v))));
}

#else

// No instruction for it: integer arithmetic, which no flush-to-zero mode of the caller can disturb.

EDGE_QKV_INLINE Float<4> from_half(const uint16_t* p) {
  Simd<4>::Half half;
  memcpy(&half, p, sizeof half);
  const Bits<4> h = __builtin_convertvector(half, Bits<4>);
  const Bits<4> magnitude = (h & 0x7fffu) << 13;
  const Bits<4> exponent = magnitude & (0x7c00u << 13);
  // Rebias the exponent; for infinity and NaN push it to the top and make NaNs quiet.
  Bits<4> bits = magnitude + ((127u - 15u) << 23);
  Bits<4> special = bits + ((128u - 16u) << 23);
  special |= (Bits<4>)(magnitude > (0x7c00u << 13)) & 0x00400000u;
  bits = exponent == (0x7c00u << 13) ? special : bits;
  // A subnormal is its mantissa under an implied 1 too many: subtract that.
  const float kImplied = 0x1p-14f;
  const Float<4> subnormal = (Float<4>)(bits + (1u << 23)) - kImplied;
  bits = exponent == 0u ? (Bits<4>)subnormal : bits;
  return (Float<4>)(bits | (h & 0x8000u) << 16);
}

EDGE_QKV_INLINE void to_half(uint16_t* p, Float<4> value) {
  const Bits<4> all = (Bits<4>)saturate_to_half<4>(value);
  const Bits<4> sign = (all >> 16) & 0x8000u;
  const Bits<4> x = all & 0x7fffffffu;
  // Below 2^-14: adding 0.5 aligns the mantissa to steps of 2^-24, rounding to nearest even.
  const uint32_t kHalfBits = 126u << 23;
  const Bits<4> subnormal = (Bits<4>)((Float<4>)x + 0.5f) - kHalfBits;
  // Otherwise rebias and round half to even.
  const Bits<4> odd = (x >> 13) & 1u;
  const Bits<4> normal = (x - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const Bits<4> nan = 0x7e00u | ((x >> 13) & 0x3ffu);
  Bits<4> h = x < (113u << 23) ? subnormal : normal;
  h = x > 0x7f800000u ? nan : h;
  const Simd<4>::Half half = __builtin_convertvector(h | sign, Simd<4>::Half);
  memcpy(p, &half, sizeof half);
}

#endif

// A row of `count` halves to floats, zeros up to the next whole vector.
EDGE_QKV_INLINE void half_row_to_float(const uint16_t* in, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store<kLanes>(out + i, from_half(in + i));
  if (i < count) {
    uint16_t tail[kLanes] = {};
    memcpy(tail, in + i, (size_t)(count - i) * sizeof *in);
    store<kLanes>(out + i, from_half(tail));
  }
}

EDGE_QKV_INLINE void float_row_to_half(const float* in, uint16_t* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) to_half(out + i, load<kLanes>(in + i));
  if (i < count) {
    float tail[kLanes] = {};
    uint16_t half[kLanes];
    memcpy(tail, in + i, (size_t)(count - i) * sizeof *in);
    to_half(half, load<kLanes>(tail));
    memcpy(out + i, half, (size_t)(count - i) * sizeof *out);
  }
}

// int8 rows: codes in [-127, 127] and a scale in half precision, see CacheType in attention.h.

// Intrinsics, for compilers widen a vector of bytes one byte at a time.
EDGE_QKV_INLINE Float<kLanes> from_codes(const int8_t* p) {
#if defined(__AVX512F__)
  const Int<kLanes> wide =
      (Int<16>)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
  const Int<kLanes> wide = (Int<8>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(__SSE2__)
  int32_t four;
  memcpy(&four, p, sizeof four);
  __m128i codes = _mm_cvtsi32_si128(four);
  codes = _mm_unpacklo_epi8(codes, codes);  // four copies of each, the topmost with the sign in place
  codes = _mm_unpacklo_epi16(codes, codes);
  const Int<kLanes> wide = (Int<4>)_mm_srai_epi32(codes, 24);
#elif defined(__aarch64__)
  uint32_t four;
  memcpy(&four, p, sizeof four);
  const int8x8_t codes = vreinterpret_s8_u32(vdup_n_u32(four));
  const Int<kLanes> wide = (Int<4>)vmovl_s16(vget_low_s16(vmovl_s8(codes)));
#else
  Simd<kLanes>::Code codes;
  memcpy(&codes, p, sizeof codes);
  const Int<kLanes> wide = __builtin_convertvector(codes, Int<kLanes>);
#endif
  return __builtin_convertvector(wide, Float<kLanes>);
}

// A row of `count` codes times its scale, exact in fp32; zeros up to the next whole vector.
EDGE_QKV_INLINE void codes_row_to_float(const int8_t* in, uint16_t scale, float* out, int64_t count) {
  uint16_t scales[kLanes] = {scale};
  const float factor = from_half(scales)[0];
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store<kLanes>(out + i, from_codes(in + i) * factor);
  if (i < count) {
    int8_t tail[kLanes] = {};
    memcpy(tail, in + i, (size_t)(count - i));
    store<kLanes>(out + i, from_codes(tail) * factor);
  }
}

// The next whole vector of a row that has `count` values left, zeros behind the last one.
EDGE_QKV_INLINE Float<kLanes> load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load<kLanes>(p);
  float tail[kLanes] = {};
  memcpy(tail, p, (size_t)count * sizeof *p);
  return load<kLanes>(tail);
}

// Writes the codes of a row and returns its scale.
EDGE_QKV_INLINE uint16_t float_row_to_codes(const float* in, int8_t* out, int64_t count) {
  Float<kLanes> largest = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Float<kLanes> x = load_some(in + i, count - i);
    const Float<kLanes> magnitude = (Float<kLanes>)((Bits<kLanes>)x & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;  // false for NaN
  }
  const float top = largest_lane(largest);
  uint16_t scale[kLanes];
  to_half(scale, splat<kLanes>(top / 127.0f));
  const float step = from_half(scale)[0];
  // Where the scale is 0, all values are far below 1/2 and become 0 by any larger divisor.
  const Float<kLanes> divisor = splat<kLanes>(step > 0.0f ? step : 1.0f);
  // Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits.
  const float kRound = 12582912.0f;
  const Int<kLanes> kRoundBits = (Int<kLanes>)splat<kLanes>(kRound);
  for (int64_t i = 0; i < count; i += kLanes) {
    Float<kLanes> x = load_some(in + i, count - i) / divisor;
    x = x > 127.0f ? splat<kLanes>(127.0f) : x;
    x = x < -127.0f ? splat<kLanes>(-127.0f) : x;
    x = x == x ? x : Float<kLanes>{};
    const Simd<kLanes>::Code codes =
        __builtin_convertvector((Int<kLanes>)(x + kRound) - kRoundBits, Simd<kLanes>::Code);
    memcpy(out + i, &codes, (size_t)(count - i < kLanes ? count - i : kLanes));
  }
  return scale[0];
}

// Products of bytes, where there is an instruction for them: each 32-bit lane of the result is that of
// `sum` plus four products of the lane's bytes, modulo 2^32. The bytes of `codes` are signed; those of
// `digits` are not where kDigitsAreUnsigned says so.
#if defined(__AVX512VNNI__)

#define EDGE_QKV_INTEGER_PRODUCTS 1
constexpr bool kDigitsAreUnsigned = true;
EDGE_QKV_INLINE Bits<16> add_products(Bits<16> sum, Bits<16> digits, Bits<16> codes) {
  return (Bits<16>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)digits, (__m512i)codes);
}
EDGE_QKV_INLINE Bits<8> add_products(Bits<8> sum, Bits<8> digits, Bits<8> codes) {
  return (Bits<8>)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)digits, (__m256i)codes);
}
EDGE_QKV_INLINE Bits<4> add_products(Bits<4> sum, Bits<4> digits, Bits<4> codes) {
  return (Bits<4>)_mm_dpbusd_epi32((__m128i)sum, (__m128i)digits, (__m128i)codes);
}

#elif defined(__AVXVNNI__)

#define EDGE_QKV_INTEGER_PRODUCTS 1
constexpr bool kDigitsAreUnsigned = true;
EDGE_QKV_INLINE Bits<8> add_products(Bits<8> sum, Bits<8> digits, Bits<8> codes) {
  return (Bits<8>)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)digits, (__m256i)codes);
}
EDGE_QKV_INLINE Bits<4> add_products(Bits<4> sum, Bits<4> digits, Bits<4> codes) {
  return (Bits<4>)_mm_dpbusd_avx_epi32((__m128i)sum, (__m128i)digits, (__m128i)codes);
}

#elif defined(__ARM_FEATURE_DOTPROD)

#define EDGE_QKV_INTEGER_PRODUCTS 1
constexpr bool kDigitsAreUnsigned = false;
EDGE_QKV_INLINE Bits<4> add_products(Bits<4> sum, Bits<4> digits, Bits<4> codes) {
  return (Bits<4>)vdotq_s32((int32x4_t)sum, (int8x16_t)digits, (int8x16_t)codes);
}

#else

#define EDGE_QKV_INTEGER_PRODUCTS 0

#endif

// Beside these, products of matrices of bytes, all signed: `sum` [2, 2] plus `a` [2, 8] times the
// transpose of `b` [2, 8], all row by row.
#if defined(__ARM_FEATURE_MATMUL_INT8)

#define EDGE_QKV_MATRIX_PRODUCTS 1
EDGE_QKV_INLINE Bits<4> add_matrix_product(Bits<4> sum, Bits<4> a, Bits<4> b) {
  return (Bits<4>)vmmlaq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}

#else

#define EDGE_QKV_MATRIX_PRODUCTS 0

#endif

}  // namespace EDGE_QKV_ISA
}  // namespace edge_qkv
