#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kThreads = 128;

// A thread takes N neighbours of a row.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(SwigluParams p) {
  release_successor();
  const int at = (blockIdx.x * kThreads + threadIdx.x) * N;
  wait_for_predecessor();
  if (at >= p.size) return;
  const T* row = static_cast<const T*>(p.x) + blockIdx.y * p.x_stride;
  const Piece<T, N> gates = load<N>(row + at), factors = load<N>(row + p.size + at);
  float gate[N], factor[N];
  widen(gates, gate), widen(factors, factor);
#pragma unroll
  for (int j = 0; j < N; ++j) gate[j] /= 1 + expf(-gate[j]);
  widen(narrow<T>(gate), gate);
#pragma unroll
  for (int j = 0; j < N; ++j) gate[j] *= factor[j];
  store(static_cast<T*>(p.out) + blockIdx.y * p.out_stride + at, narrow<T>(gate));
}

template <class T, int N>
void run(const SwigluParams& p, Stream stream) {
  const int pieces = (p.size + N - 1) / N;
  launch("swiglu", swiglu_kernel<T, N>, dim3((pieces + kThreads - 1) / kThreads, p.rows), kThreads, 0, stream, p);
}

}  // namespace

void swiglu(const SwigluParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool aligned = in_pieces(p.x, sizeof(T), p.size, &p.x_stride, 1) &&
                         in_pieces(p.out, sizeof(T), p.size, &p.out_stride, 1);
    return aligned ? run<T, 16 / sizeof(T)>(p, stream) : run<T, 1>(p, stream);
  });
}

}  // namespace pydflash::cuda
