#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kHeld = 2;  // pieces of a row that a thread keeps in registers

// One block a row.
template <class T, int N>
__global__ void __launch_bounds__(1024) add_rms_norm_kernel(AddRmsNormParams p) {
  release_successor();
  const int pieces = p.size / N, step = blockDim.x;
  wait_for_predecessor();

  const T* weight = static_cast<const T*>(p.weight);
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* delta = static_cast<const T*>(p.delta) + row * p.delta_stride;
  T* sum = static_cast<T*>(p.sum) + row * p.size;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const bool adds = p.delta != nullptr;

  float squares = 0;
  const auto add = [&](Piece<T, N>& s, const Piece<T, N>& d, int at) {
    float wide[N];
    widen(s, wide);
    if (adds) {
      float more[N];
      widen(d, more);
#pragma unroll
      for (int j = 0; j < N; ++j) wide[j] += more[j];
      s = narrow<T>(wide);
      store(sum + at, s);
      widen(s, wide);
    }
    squares += square_sum(wide);
  };
  // All loads of the held pieces come before the first use: sum may be x, so the compiler cannot move them.
  Piece<T, N> held[kHeld], added[kHeld], weights[kHeld];
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = threadIdx.x + n * step;
    if (i >= pieces) continue;
    held[n] = load<N>(x + i * N);
    if (adds) added[n] = load<N>(delta + i * N);
    weights[n] = load<N>(weight + i * N);
  }
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = threadIdx.x + n * step;
    if (i < pieces) add(held[n], added[n], i * N);
  }
#pragma unroll 1
  for (int i = threadIdx.x + kHeld * step; i < pieces; i += step) {
    Piece<T, N> s = load<N>(x + i * N), d{};
    if (adds) d = load<N>(delta + i * N);
    add(s, d, i * N);
  }

  __shared__ float parts[32];
  squares = lane_sum(squares);
  const int lane = threadIdx.x % 32, warps = step / 32;
  if (lane == 0) parts[threadIdx.x / 32] = squares;
  __syncthreads();
  const float total = lane_sum(lane < warps ? parts[lane] : 0.0f);
  const float scale = rsqrtf(total / float(p.size) + p.eps);

#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = threadIdx.x + n * step;
    if (i < pieces)
      store(out + i * N, scaled(held[n], scale, weights[n], p.weight_offset, p.round_first));
  }
  const T* s = adds ? sum : x;
#pragma unroll 1
  for (int i = threadIdx.x + kHeld * step; i < pieces; i += step) {
    const int at = i * N;
    store(out + at, scaled(load<N>(s + at), scale, load<N>(weight + at), p.weight_offset, p.round_first));
  }
}

template <class T, int N>
void run(const AddRmsNormParams& p, Stream stream) {
  const int pieces = p.size / N, threads = ((pieces + kHeld - 1) / kHeld + 31) / 32 * 32;
  launch("add_rms_norm", add_rms_norm_kernel<T, N>, p.rows, threads < 1024 ? threads : 1024, 0, stream, p);
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const int size = sizeof(T);
    const bool aligned = in_pieces(p.x, size, p.size, &p.x_stride, 1) && in_pieces(p.sum, size, p.size, nullptr, 0) &&
                         in_pieces(p.delta, size, p.size, &p.delta_stride, p.delta != nullptr) &&
                         in_pieces(p.weight, size, p.size, nullptr, 0) &&
                         in_pieces(p.out, size, p.size, &p.out_stride, 1);
    return aligned ? run<T, 16 / sizeof(T)>(p, stream) : run<T, 1>(p, stream);
  });
}

}  // namespace pydflash::cuda
