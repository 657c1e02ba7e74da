#include "sycl/kernels/gates.hpp"
#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {

void apply_gate(const ApplyGateParams& p, Stream stream) {
  const int64_t count = int64_t(p.rows) * p.size;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<ApplyGate<T>>("apply_gate", stream, groups_for(count), kThreads, static_cast<const T*>(p.x),
                         static_cast<const T*>(p.gate), static_cast<T*>(p.out), p.x_stride, p.gate_stride, p.size,
                         p.activation == Activation::sigmoid, count);
  });
}

void soft_cap(const SoftCapParams& p, Stream stream) {
  const int64_t count = int64_t(p.rows) * p.size;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<SoftCap<T>>("soft_cap", stream, groups_for(count), kThreads, static_cast<const T*>(p.x),
                       static_cast<T*>(p.out), p.x_stride, p.size, p.cap, count);
  });
}

}  // namespace pydflash::sycl_backend
