// skinny_linear: a sub-group makes one output of one row; the plain form, whatever the sizes.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

template <class T>
struct SkinnyLinear {
  const T* x;
  const T *weight0, *weight1, *weight2;  // null where there are fewer
  const T *bias0, *bias1, *bias2;
  T* out;
  int64_t x_stride, out_stride, count;  // count: rows * outputs of a row
  int in_features, size0, size1, columns;
  bool gated;

  void operator()(::sycl::nd_item<1> item) const {
    const ::sycl::sub_group lanes = item.get_sub_group();
    const int64_t per_group = int64_t(lanes.get_group_linear_range());
    const int64_t at = int64_t(item.get_group(0)) * per_group + int64_t(lanes.get_group_linear_id());
    const bool live = at < count;
    const int64_t row = live ? at / columns : 0;
    const int column = live ? int(at % columns) : 0;
    const bool leads = lanes.get_local_linear_id() == 0;
    if (gated) {
      const float gate = one(lanes, row, weight0, bias0, column), value = one(lanes, row, weight1, bias1, column);
      const float silu = widen(narrow<T>(gate / (1.0f + ::sycl::exp(-gate))));
      if (live && leads) out[row * out_stride + column] = narrow<T>(silu * value);
      return;
    }
    const bool first = column < size0, second = column < size0 + size1;
    const float value = one(lanes, row, first ? weight0 : second ? weight1 : weight2,
                            first ? bias0 : second ? bias1 : bias2,
                            first ? column : second ? column - size0 : column - size0 - size1);
    if (live && leads) out[row * out_stride + column] = narrow<T>(value);
  }

  // A product, rounded to T.
  float one(::sycl::sub_group lanes, int64_t row, const T* weight, const T* bias, int column) const {
    const T *a = x + row * x_stride, *b = weight + int64_t(column) * in_features;
    float sum = 0;
    for (int i = int(lanes.get_local_linear_id()); i < in_features; i += int(lanes.get_local_linear_range()))
      sum += widen(a[i]) * widen(b[i]);
    sum = ::sycl::reduce_over_group(lanes, sum, ::sycl::plus<float>());
    return widen(narrow<T>(bias == nullptr ? sum : sum + widen(bias[column])));
  }
};

}  // namespace pydflash::sycl_backend
