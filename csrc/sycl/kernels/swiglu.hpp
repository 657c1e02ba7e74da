// swiglu: a work-item takes a value of every so many of a row.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

template <class T>
struct Swiglu {
  const T* x;
  T* out;
  int64_t x_stride, out_stride;
  int size;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t row = int64_t(item.get_group(0));
    for (int i = int(item.get_local_id(0)); i < size; i += int(item.get_local_range(0))) {
      const float gate = widen(x[row * x_stride + i]), factor = widen(x[row * x_stride + size + i]);
      out[row * out_stride + i] = narrow<T>(widen(narrow<T>(gate / (1.0f + ::sycl::exp(-gate)))) * factor);
    }
  }
};

}  // namespace pydflash::sycl_backend
