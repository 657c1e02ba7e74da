// Rows of narrow floats: moving them in 16-byte accesses, conversions, sums and norms.
#pragma once

#include <type_traits>

#include "cuda/cuda.cuh"

namespace pydflash::cuda {

// N neighbouring values of a row as they lie in memory. In whole words, which the compiler keeps in whole registers.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Piece {
  using Word = std::conditional_t<sizeof(T) * N % 4 == 0, uint32_t, T>;
  static constexpr int kWords = int(sizeof(T)) * N / int(sizeof(Word));
  Word words[kWords];
};

// Whether rows of `size` values can be moved in 16-byte accesses: their address, length and strides.
inline bool in_pieces(const void* data, int element_size, int64_t size, const int64_t* strides, int count) {
  bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0 && size * element_size % 16 == 0;
  for (int i = 0; i < count; ++i) fits = fits && strides[i] * element_size % 16 == 0;
  return fits;
}

template <int N, class T>
__device__ __forceinline__ Piece<T, N> load(const T* from) {
  return *reinterpret_cast<const Piece<T, N>*>(from);
}

template <int N, class T>
__device__ __forceinline__ void store(T* to, const Piece<T, N>& piece) {
  *reinterpret_cast<Piece<T, N>*>(to) = piece;
}

template <class T, int N>
__device__ __forceinline__ Piece<T, N> pack(const T (&values)[N]) {
  Piece<T, N> piece;
  memcpy(&piece, values, sizeof(piece));
  return piece;
}

template <class T, int N>
__device__ __forceinline__ void unpack(const Piece<T, N>& piece, T (&values)[N]) {
  memcpy(values, &piece, sizeof(piece));
}

// to_float and from_float as the device has them; equal to those of numeric.h but for the bits of a NaN.
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return to_float(x); }
__device__ __forceinline__ float widen(f16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}

// Two values in a word, a in its low half.
__device__ __forceinline__ void widen_pair(bf16, uint32_t word, float& a, float& b) {
  a = bit_cast<float>(word << 16), b = bit_cast<float>(word & 0xffff0000u);
}
__device__ __forceinline__ void widen_pair(f16, uint32_t word, float& a, float& b) {
  asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(a), "=f"(b)
      : "r"(word));
}
__device__ __forceinline__ uint32_t narrow_pair(bf16, float a, float b) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}
__device__ __forceinline__ uint32_t narrow_pair(f16, float a, float b) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

template <class T, int N>
__device__ __forceinline__ void widen(const Piece<T, N>& piece, float (&x)[N]) {
  if constexpr (sizeof(T) == 4) {
    unpack(bit_cast<Piece<float, N>>(piece), x);
  } else if constexpr (N == 1) {
    x[0] = widen(piece.words[0]);
  } else {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) widen_pair(T{}, piece.words[j], x[2 * j], x[2 * j + 1]);
  }
}

template <class T, int N>
__device__ __forceinline__ Piece<T, N> narrow(const float (&x)[N]) {
  Piece<T, N> piece;
  if constexpr (sizeof(T) == 4) {
    piece = pack(x);
  } else if constexpr (N == 1) {
    piece.words[0].bits = uint16_t(narrow_pair(T{}, x[0], 0.0f));
  } else {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) piece.words[j] = narrow_pair(T{}, x[2 * j], x[2 * j + 1]);
  }
  return piece;
}

// Sum over each group of `width` lanes, a power of two; every lane of the warp takes part and gets its group's.
__device__ __forceinline__ float lane_sum(float x, int width = 32) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, step);
    if (step < width) x += other;
  }
  return x;
}

template <int N>
__device__ __forceinline__ float square_sum(const float (&x)[N]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) sum += x[j] * x[j];
  return sum;
}

// y * (weight + offset) for y = x * scale, which is rounded on its own where round_first says so.
template <class T, int N>
__device__ __forceinline__ Piece<T, N> scaled(const Piece<T, N>& x, float scale, const Piece<T, N>& weight,
                                              float offset, bool round_first) {
  float y[N], w[N];
  widen(x, y), widen(weight, w);
#pragma unroll
  for (int j = 0; j < N; ++j) y[j] *= scale;
  if (round_first) widen(narrow<T>(y), y);
#pragma unroll
  for (int j = 0; j < N; ++j) y[j] *= w[j] + offset;
  return narrow<T>(y);
}

// The row of position `length + n` in a cache that may be a ring.
__device__ __forceinline__ int64_t ring_row(int32_t length, int32_t n, int64_t capacity) {
  const uint32_t position = uint32_t(length) + uint32_t(n);
  return position < capacity ? position : position % uint32_t(capacity);
}

}  // namespace pydflash::cuda
