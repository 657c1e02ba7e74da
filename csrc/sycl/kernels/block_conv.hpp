// block_conv: a work-item makes one channel of one slot.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// RTC f32: BlockConv<float>
// RTC bf16: BlockConv<bfloat>
// RTC f16: BlockConv<half>
template <class T>
struct BlockConv {
  const T *x, *base, *delta;
  T* y;
  Strides2 x_stride;      // batch, slot
  Strides3 delta_stride;  // batch, slot, tap
  int slots, channels, taps, group_channels;
  int64_t count;  // of outputs

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int c = int(at % channels);
    const int64_t slot = at / channels % slots, b = at / channels / slots;
    const T* row = x + b * x_stride.a + slot * x_stride.b + c;
    const T* dynamic = delta + b * delta_stride.a + slot * delta_stride.b + c / group_channels;
    float sum = 0;
    for (int t = 0; t < taps && t <= slot; ++t)
      sum += (widen(base[int64_t(t) * channels + c]) + widen(dynamic[t * delta_stride.c])) *
             widen(row[-t * x_stride.b]);
    y[at] = narrow<T>(sum);
  }
};

}  // namespace pydflash::sycl_backend
