#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kSlots = 4;  // that share a reading of what is known of a token

// A thread takes N neighbouring tokens of kSlots slots; then each draft's token is done anew in the slots behind it, by
// the block that has written it.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) apply_penalties_kernel(ApplyPenaltiesParams p) {
  release_successor();
  const int block_first = blockIdx.x * kThreads * N, first = block_first + threadIdx.x * N, b = blockIdx.z;
  const int begin = blockIdx.y * kSlots, end = min(begin + kSlots, p.slots);
  const int64_t row = int64_t(b) * p.vocab_size;
  const T* logits = static_cast<const T*>(p.logits) + b * p.logits_stride[0];
  float* out = p.out + row * p.slots;
  wait_for_predecessor();
  const float repetition = p.repetition[b], presence = p.presence[b], frequency = p.frequency[b];
  if (first < p.vocab_size) {
    int in_prompt[N], counts[N];
    float bias[N];
    unpack(load<N>(p.in_prompt + row + first), in_prompt), unpack(load<N>(p.counts + row + first), counts);
    unpack(load<N>(p.bias + row + first), bias);
#pragma unroll
    for (int n = 0; n < kSlots; ++n) {
      const int i = begin + n;
      if (i >= end) break;
      float x[N];
      widen(load<N>(logits + i * p.logits_stride[1] + first), x);
#pragma unroll
      for (int j = 0; j < N; ++j)
        x[j] = penalised(x[j], in_prompt[j] != 0, counts[j], repetition, presence, frequency, bias[j]);
      store(out + int64_t(i) * p.vocab_size + first, pack(x));
    }
  }
  __syncthreads();
  const int64_t* tokens = p.tokens + int64_t(b) * p.slots;
  const int j = threadIdx.x;
  if (j < 1 || j >= p.slots) return;
  const int64_t v = tokens[j];
  if (v < block_first || v >= min(block_first + kThreads * N, p.vocab_size)) return;
  for (int i = begin; i < end; ++i) {
    const int64_t sees = p.visibility[b * p.visibility_stride + i];
    if ((sees >> j & 1) == 0) continue;
    const int count = p.counts[row + v] + drafts_on_path(tokens, p.slots, sees, v);
    out[int64_t(i) * p.vocab_size + v] = penalised(widen(logits[i * p.logits_stride[1] + v]), p.in_prompt[row + v] != 0,
                                                   count, repetition, presence, frequency, p.bias[row + v]);
  }
}

template <class T, int N>
void run(const ApplyPenaltiesParams& p, Stream stream) {
  const int each = kThreads * N;
  launch("apply_penalties", apply_penalties_kernel<T, N>,
         dim3((p.vocab_size + each - 1) / each, (p.slots + kSlots - 1) / kSlots, p.batch), kThreads, 0, stream, p);
}

}  // namespace

void apply_penalties(const ApplyPenaltiesParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool aligned = p.vocab_size % 4 == 0 && in_pieces(p.logits, sizeof(T), p.vocab_size, p.logits_stride, 2) &&
                         in_pieces(p.in_prompt, 4, p.vocab_size, nullptr, 0) &&
                         in_pieces(p.counts, 4, p.vocab_size, nullptr, 0) &&
                         in_pieces(p.bias, 4, p.vocab_size, nullptr, 0);
    return aligned ? run<T, 16 / sizeof(T)>(p, stream) : run<T, 1>(p, stream);
  });
}

}  // namespace pydflash::cuda
