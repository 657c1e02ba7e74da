#include "sycl/kernels/skinny_linear.hpp"
#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

void skinny_linear(const SkinnyLinearParams& p, Stream stream) {
  int columns = p.out_features[0];
  if (!p.gated) columns += p.out_features[1] + p.out_features[2];
  // As many groups as outputs, of one sub-group at least; where a group holds more of them, the last ones idle.
  constexpr int kThreads = 32;
  const int64_t count = int64_t(p.rows) * columns;
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto weight = [&](int i) { return static_cast<const T*>(p.weights[i]); };
    const auto bias = [&](int i) { return static_cast<const T*>(p.biases[i]); };
    launch<SkinnyLinear<T>>("skinny_linear", stream, count, kThreads,
                            static_cast<const T*>(p.x), weight(0), weight(1), weight(2), bias(0), bias(1), bias(2),
                            static_cast<T*>(p.out), p.x_stride, p.out_stride, count, p.in_features, p.out_features[0],
                            p.out_features[1], columns, p.gated);
  };
  return p.dtype == DType::bf16 ? run(bfloat{}) : run(half{});
}

}  // namespace pydflash::sycl_backend
