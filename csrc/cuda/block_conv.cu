#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kThreads = 64;

// A thread makes N channels of `each` slots in a row; N divides the group or is 1, so they share their dynamic taps.
template <class T, int N, int kTaps>
__global__ void __launch_bounds__(kThreads) block_conv_kernel(BlockConvParams p, int each) {
  release_successor();
  const int c = (blockIdx.y * kThreads + threadIdx.x) * N;
  const int first = blockIdx.x * each, last = min(first + each, p.slots);
  const int64_t b = blockIdx.z;
  const T* base = static_cast<const T*>(p.base) + c;
  const T* x = static_cast<const T*>(p.x) + b * p.x_stride[0] + c;
  const T* delta = static_cast<const T*>(p.delta) + b * p.delta_stride[0] + c / (p.channels / p.groups);
  T* y = static_cast<T*>(p.y) + b * p.slots * p.channels + c;
  wait_for_predecessor();
  if (c >= p.channels) return;

  // rows[t] is x of slot - t, zero before slot 0; they move up by one from slot to slot.
  Piece<T, N> rows[kTaps]{}, weights[kTaps]{};
#pragma unroll
  for (int t = 0; t < kTaps; ++t) {
    if (t < p.taps) weights[t] = load<N>(base + t * p.channels);
    if (t + 1 < p.taps && t < first) rows[t] = load<N>(x + (first - 1 - t) * p.x_stride[1]);
  }
#pragma unroll 1
  for (int slot = first; slot < last; ++slot) {
#pragma unroll
    for (int t = kTaps - 1; t > 0; --t) rows[t] = rows[t - 1];
    rows[0] = load<N>(x + slot * p.x_stride[1]);
    T dynamic[kTaps];
#pragma unroll
    for (int t = 0; t < kTaps; ++t)
      if (t < p.taps) dynamic[t] = delta[slot * p.delta_stride[1] + t * p.delta_stride[2]];
    float sum[N] = {};
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      if (t >= p.taps || t > slot) continue;
      float weight[N], row[N];
      widen(weights[t], weight), widen(rows[t], row);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += (weight[j] + widen(dynamic[t])) * row[j];
    }
    store(y + int64_t(slot) * p.channels, narrow<T>(sum));
  }
}

template <class T, int N>
void run(const BlockConvParams& p, Stream stream) {
  const auto kernel = p.taps <= 2   ? block_conv_kernel<T, N, 2>
                      : p.taps <= 4 ? block_conv_kernel<T, N, 4>
                                    : block_conv_kernel<T, N, 8>;
  // One slot a thread where that fits the device at once, else some, so that weights and rows are read less often.
  const int parts = (p.channels / N + kThreads - 1) / kThreads;
  const bool fits = int64_t(p.batch) * p.slots * parts <= device_info(stream.device).multiprocessors * 8;
  const int each = fits ? 1 : 4;
  launch("block_conv", kernel, dim3((p.slots + each - 1) / each, parts, p.batch), kThreads, 0, stream, p, each);
}

}  // namespace

void block_conv(const BlockConvParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = 16 / sizeof(T);
    const int size = sizeof(T);
    const bool pieces = p.channels / p.groups % N == 0 && in_pieces(p.x, size, p.channels, p.x_stride, 2) &&
                        in_pieces(p.base, size, p.channels, nullptr, 0) &&
                        in_pieces(p.y, size, p.channels, nullptr, 0);
    return pieces ? run<T, N>(p, stream) : run<T, 1>(p, stream);
  });
}

}  // namespace pydflash::cuda
