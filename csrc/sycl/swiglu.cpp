#include "sycl/kernels/swiglu.hpp"

#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

void swiglu(const SwigluParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<Swiglu<T>>("swiglu", stream, p.rows, 256, static_cast<const T*>(p.x), static_cast<T*>(p.out), p.x_stride,
                      p.out_stride, p.size);
  });
}

}  // namespace pydflash::sycl_backend
