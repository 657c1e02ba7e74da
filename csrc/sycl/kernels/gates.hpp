// apply_gate and soft_cap: a work-item makes one number of a row.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// RTC f32: ApplyGate<float>
// RTC bf16: ApplyGate<bfloat>
// RTC f16: ApplyGate<half>
template <class T>
struct ApplyGate {
  const T *x, *gate;
  T* out;
  int64_t x_stride, gate_stride;
  int size;
  bool sigmoid;  // else GELU(tanh)
  int64_t count;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int64_t row = at / size, c = at % size;
    const float z = widen(gate[row * gate_stride + c]);
    const float act = sigmoid ? 1.0f / (1.0f + ::sycl::exp(-z))
                              : 0.5f * z * (1.0f + ::sycl::tanh(0.7978845608f * (z + 0.044715f * z * z * z)));
    out[at] = narrow<T>(widen(x[row * x_stride + c]) * widen(narrow<T>(act)));
  }
};

// RTC f32: SoftCap<float>
// RTC bf16: SoftCap<bfloat>
// RTC f16: SoftCap<half>
template <class T>
struct SoftCap {
  const T* x;
  T* out;
  int64_t x_stride;
  int size;
  float cap;
  int64_t count;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const float z = widen(narrow<T>(widen(x[at / size * x_stride + at % size]) / cap));
    out[at] = narrow<T>(widen(narrow<T>(::sycl::tanh(z))) * cap);
  }
};

}  // namespace pydflash::sycl_backend
