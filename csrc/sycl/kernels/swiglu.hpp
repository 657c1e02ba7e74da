// swiglu: a work-item makes one number of a row.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// RTC f32: Swiglu<float>
// RTC bf16: Swiglu<bfloat>
// RTC f16: Swiglu<half>
template <class T>
struct Swiglu {
  const T* x;
  T* out;
  int64_t x_stride, out_stride;
  int size;
  int64_t count;  // of outputs

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int64_t row = at / size, c = at % size;
    const T* from = x + row * x_stride + c;
    const float gate = widen(from[0]), silu = widen(narrow<T>(gate / (1.0f + ::sycl::exp(-gate))));
    out[row * out_stride + c] = narrow<T>(silu * widen(from[size]));
  }
};

}  // namespace pydflash::sycl_backend
