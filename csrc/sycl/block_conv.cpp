#include "sycl/kernels/block_conv.hpp"
#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

void block_conv(const BlockConvParams& p, Stream stream) {
  constexpr int kThreads = 128;
  const int64_t count = int64_t(p.batch) * p.slots * p.channels;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<BlockConv<T>>("block_conv", stream, (count + kThreads - 1) / kThreads, kThreads,
                         static_cast<const T*>(p.x), static_cast<const T*>(p.base), static_cast<const T*>(p.delta),
                         static_cast<T*>(p.y), Strides2{p.x_stride[0], p.x_stride[1]},
                         Strides3{p.delta_stride[0], p.delta_stride[1], p.delta_stride[2]}, p.slots, p.channels, p.taps,
                         p.channels / p.groups, count);
  });
}

}  // namespace pydflash::sycl_backend
