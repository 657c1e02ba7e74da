// Shared by the SYCL kernels, which are plain SYCL 2020 and know nothing of the host: storage types and rows of them.
#pragma once

#include <sycl/sycl.hpp>

#include <cstdint>
#include <type_traits>

#include "numeric.h"

// For the device's compiler alone.
#if defined(__clang__)
#define PYDFLASH_UNROLL _Pragma("unroll")
#define PYDFLASH_ROLLED _Pragma("nounroll")
#else
#define PYDFLASH_UNROLL
#define PYDFLASH_ROLLED
#endif

namespace pydflash::sycl_backend {

// Storage types of kernels. Arithmetic is done in float: read with widen(), written with narrow<T>(). bfloat is bits of
// our own: the runtime's bfloat16 needs a device image of its own, on which RTC's cache (2026.0) reads a null pointer.
using bfloat = bf16;
using half = ::sycl::half;

inline float widen(float x) { return x; }
inline float widen(bfloat x) { return to_float(x); }
inline float widen(half x) { return static_cast<float>(x); }

template <class T>
T narrow(float x) {
  if constexpr (std::is_same_v<T, bfloat>)
    return from_float<bfloat>(x);
  else
    return static_cast<T>(x);
}

// Strides in elements, by value in a kernel's fields.
struct Strides2 {
  int64_t a, b;
};
struct Strides3 {
  int64_t a, b, c;
};
struct Strides4 {
  int64_t a, b, c, d;
};

// The row of position `length + n` in a cache that may be a ring.
inline int64_t ring_row(int32_t length, int32_t n, int64_t capacity) {
  const uint32_t position = uint32_t(length) + uint32_t(n);
  return position < uint64_t(capacity) ? int64_t(position) : int64_t(position % uint32_t(capacity));
}

}  // namespace pydflash::sycl_backend
