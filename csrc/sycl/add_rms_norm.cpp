#include "sycl/kernels/add_rms_norm.hpp"
#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

void add_rms_norm(const AddRmsNormParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<AddRmsNorm<T>>("add_rms_norm", stream, p.rows, 256, static_cast<const T*>(p.x),
                          static_cast<const T*>(p.delta), static_cast<const T*>(p.weight), static_cast<T*>(p.sum),
                          static_cast<T*>(p.out), p.x_stride, p.delta_stride, p.out_stride, p.size, p.eps,
                          p.weight_offset, p.round_first);
  });
}

}  // namespace pydflash::sycl_backend
