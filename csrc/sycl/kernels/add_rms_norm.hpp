// add_rms_norm: a work-group takes a row.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// y * (weight + offset) for y = x * scale, which is rounded on its own where round_first says so.
template <class T>
T scaled(float x, float scale, float weight, float offset, bool round_first) {
  const float y = x * scale;
  return narrow<T>((round_first ? widen(narrow<T>(y)) : y) * (weight + offset));
}

// RTC f32: AddRmsNorm<float>
// RTC bf16: AddRmsNorm<bfloat>
// RTC f16: AddRmsNorm<half>
template <class T>
struct AddRmsNorm {
  const T *x, *delta, *weight;  // delta may be null
  T *sum, *out;
  int64_t x_stride, delta_stride, out_stride;
  int size;
  float eps, weight_offset;
  bool round_first;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t row = int64_t(item.get_group(0));
    const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0));
    const T *from = x + row * x_stride, *more = delta + row * delta_stride;
    T* total = sum + row * size;
    float squares = 0;
    for (int i = first; i < size; i += step) {
      float value = widen(from[i]);
      if (delta != nullptr) {
        total[i] = narrow<T>(value + widen(more[i]));
        value = widen(total[i]);
      }
      squares += value * value;
    }
    squares = ::sycl::reduce_over_group(item.get_group(), squares, ::sycl::plus<float>());
    const float scale = 1.0f / ::sycl::sqrt(squares / float(size) + eps);
    const T* summed = delta != nullptr ? total : from;
    for (int i = first; i < size; i += step)
      out[row * out_stride + i] = scaled<T>(widen(summed[i]), scale, widen(weight[i]), weight_offset, round_first);
  }
};

}  // namespace pydflash::sycl_backend
