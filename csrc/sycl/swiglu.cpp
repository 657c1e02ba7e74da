#include "sycl/kernels/swiglu.hpp"
#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {

void swiglu(const SwigluParams& p, Stream stream) {
  const int64_t count = int64_t(p.rows) * p.size;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<Swiglu<T>>("swiglu", stream, groups_for(count), kThreads, static_cast<const T*>(p.x),
                      static_cast<T*>(p.out), p.x_stride, p.out_stride, p.size, count);
  });
}

}  // namespace pydflash::sycl_backend
