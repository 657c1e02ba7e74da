// One vector of floats at the width of the level being compiled, in GCC and Clang vector extensions; intrinsics
// only where the extensions have no word for an instruction. Everything is inlined or internal to its file.
#pragma once

#include <cstring>
#include <utility>

#include "cpu/cpu.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int N>
struct VectorOf {
  typedef float Floats __attribute__((vector_size(N * 4)));
  typedef int32_t Ints __attribute__((vector_size(N * 4)));
  typedef uint32_t Bits __attribute__((vector_size(N * 4)));
  typedef uint16_t Halves __attribute__((vector_size(N * 2)));
};
using Floats = VectorOf<kLanes>::Floats;
using Ints = VectorOf<kLanes>::Ints;

template <class V>
PYDFLASH_FN V load_raw(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <int N = kLanes>
PYDFLASH_FN typename VectorOf<N>::Floats splat(float x) {
  return x - typename VectorOf<N>::Floats{};
}

// N values of any storage type to floats, and back with rounding to nearest even.
template <int N = kLanes>
PYDFLASH_FN typename VectorOf<N>::Floats load(const float* from) {
  return load_raw<typename VectorOf<N>::Floats>(from);
}
template <int N = kLanes>
PYDFLASH_FN typename VectorOf<N>::Floats load(const bf16* from) {
  using Of = VectorOf<N>;
#if defined(__AVX512F__)
  // In one instruction where GCC 12 makes two halves; below, too.
  if constexpr (N == 16)
    return bit_cast<typename Of::Floats>(
        bit_cast<typename Of::Bits>(_mm512_maskz_cvtepu16_epi32(__mmask16(-1), load_raw<__m256i>(from))) << 16);
#endif
  const auto bits = __builtin_convertvector(load_raw<typename Of::Halves>(from), typename Of::Bits);
  return bit_cast<typename Of::Floats>(bits << 16);
}
template <int N = kLanes>
PYDFLASH_FN typename VectorOf<N>::Floats load(const f16* from) {
  using Of = VectorOf<N>;
#if defined(__AVX512F__)
  // The zero-masked forms: GCC 12 warns of the undefined operand of the others.
  if constexpr (N == 16)
    return bit_cast<typename Of::Floats>(_mm512_maskz_cvtph_ps(__mmask16(-1), load_raw<__m256i>(from)));
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<typename Of::Floats>(_mm256_cvtph_ps(load_raw<__m128i>(from)));
#endif
  // As to_float(f16) in numeric.h, lane by lane.
  const auto bits = __builtin_convertvector(load_raw<typename Of::Halves>(from), typename Of::Bits);
  const auto magnitude = (bits & 0x7fff) << 13;
  const auto value = bit_cast<typename Of::Floats>(magnitude) * 5.192296858534828e33f;
  const auto scaled = bit_cast<typename Of::Bits>(value);
  const auto special = bit_cast<typename Of::Bits>(magnitude >= 0x0f800000u);
  return bit_cast<typename Of::Floats>((special & (magnitude | 0x7f800000u)) | (~special & scaled) |
                                       ((bits & 0x8000) << 16));
}

template <int N = kLanes>
PYDFLASH_FN void store(float* to, typename VectorOf<N>::Floats x) {
  memcpy(to, &x, sizeof(x));
}
template <int N = kLanes>
PYDFLASH_FN void store(bf16* to, typename VectorOf<N>::Floats x) {
  using Of = VectorOf<N>;
  const auto bits = bit_cast<typename Of::Bits>(x);
  const auto nan = bit_cast<typename Of::Bits>(x != x);
  const auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const auto word = (nan & ((bits >> 16) | 0x40)) | (~nan & rounded);
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const __m256i halves = _mm512_maskz_cvtepi32_epi16(__mmask16(-1), bit_cast<__m512i>(word));
    memcpy(to, &halves, sizeof(halves));
    return;
  }
#endif
  const auto halves = __builtin_convertvector(word, typename Of::Halves);
  memcpy(to, &halves, sizeof(halves));
}
template <int N = kLanes>
PYDFLASH_FN void store(f16* to, typename VectorOf<N>::Floats x) {
#if defined(__F16C__)
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(-1), bit_cast<__m512>(x), rounding);
    memcpy(to, &halves, sizeof(halves));
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    const __m128i halves = _mm256_cvtps_ph(bit_cast<__m256>(x), rounding);
    memcpy(to, &halves, sizeof(halves));
    return;
  }
#endif
  for (int i = 0; i < N; ++i) to[i] = from_float<f16>(x[i]);
}

// Calls run(i, count) for each whole vector of `size` values, and for what is left.
template <class Run>
PYDFLASH_FN void by_vectors(int size, Run run) {
  int i = 0;
  for (; i + kLanes <= size; i += kLanes) run(i, kLanes);
  if (i < size) run(i, size - i);
}

// The first `count` of a vector; the other lanes are zero.
template <class T>
PYDFLASH_FN Floats load_some(const T* from, int count) {
  if (count == kLanes) return load(from);
  T values[kLanes] = {};
  memcpy(values, from, size_t(count) * sizeof(T));
  return load(values);
}

template <class T>
PYDFLASH_FN void store_some(T* to, Floats x, int count) {
  if (count == kLanes) return store(to, x);
  T values[kLanes];
  store(values, x);
  memcpy(to, values, size_t(count) * sizeof(T));
}

// Lane i of the result is lane i of `a` where bit H of i is clear, else lane i - H of `b`; or (upper) lane i + H of
// `a` where it is clear, else lane i of `b`.
template <int H, bool Upper, int... I>
PYDFLASH_FN Floats exchange(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, ((I & H) != 0 ? kLanes + I - (Upper ? 0 : H) : I + (Upper ? H : 0))...);
}

template <int H = 1>
PYDFLASH_FN void transpose(Floats (&rows)[kLanes]) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if ((i & H) == 0) {
      const Floats a = rows[i], b = rows[i + H];
      rows[i] = exchange<H, false>(a, b, Lanes{}), rows[i + H] = exchange<H, true>(a, b, Lanes{});
    }
  if constexpr (2 * H < kLanes) transpose<2 * H>(rows);
}

// The larger of each pair; b where one is NaN.
PYDFLASH_FN Floats max(Floats a, Floats b) { return a > b ? a : b; }

PYDFLASH_FN float sum_lanes(Floats x) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
}
PYDFLASH_FN float max_lanes(Floats x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// x * 2^n for integral n in [-300, 300]: infinity above the range of floats, zero below it.
PYDFLASH_FN Floats scale_by_power(Floats x, Floats n) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_maskz_scalef_ps(__mmask16(-1), bit_cast<__m512>(x), bit_cast<__m512>(n)));
#else
  const Ints power = __builtin_convertvector(n, Ints), half = power >> 1;
  return x * bit_cast<Floats>((half + 127) << 23) * bit_cast<Floats>((power - half + 127) << 23);
#endif
}

PYDFLASH_FN Floats round_to_integer(Floats x) {  // |x| < 2^22
  const float magic = 0x1.8p23f;
  return (x + magic) - magic;
}

// 2^x to 2 ulp for |x| <= 200, NaN at NaN. Polynomials: own minimax fits.
PYDFLASH_FN Floats exp2(Floats x) {
  const Floats n = round_to_integer(x), f = x - n;
  Floats y = f * 1.326472727e-03f + 9.671512756e-03f;
  y = y * f + 5.550733744e-02f;
  y = y * f + 2.402224208e-01f;
  y = y * f + 6.931469776e-01f;
  y = y * f + 1.0f;
  return scale_by_power(y, n);
}

// e^x to 2 ulp; 0 far below the range of floats and at -infinity, NaN at NaN.
PYDFLASH_FN Floats exp(Floats x) {
  x = x < -138.0f ? splat(-138.0f) : x;
  x = x > 138.0f ? splat(138.0f) : x;
  const Floats n = round_to_integer(x * 1.44269504f);
  // ln 2 in two parts, the first with few enough bits that n times it is exact.
  const Floats f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats y = f * 1.384365364e-03f + 8.374155381e-03f;
  y = y * f + 4.166800204e-02f;
  y = y * f + 1.666643126e-01f;
  y = y * f + 4.999999421e-01f;
  y = y * f + 1.0f;
  y = y * f + 1.0f;
  return scale_by_power(y, n);
}

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
