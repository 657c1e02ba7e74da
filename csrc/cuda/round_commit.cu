#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kThreads = 256, kUnits = 2;

__device__ int in_block(const RoundCommitParams& p, int slot) { return max(0, min(slot, p.slots - 1)); }

// The numbers of sequence b, by one block.
__device__ void commit(const RoundCommitParams& p, int b, bool active, int accepted) {
  const int64_t first = int64_t(b) * p.slots, bonus = p.bonus[b];
  int64_t* record = p.record + int64_t(b) * (p.slots + 1);
  const int total = active ? accepted + 1 : 0;
#pragma unroll 1
  for (int n = threadIdx.x; n < p.slots; n += kThreads)
    record[n] = n + 1 < total ? p.tokens[first + in_block(p, p.index[first + n + 1])] : n + 1 == total ? bonus : -1;
  if (threadIdx.x > 0) return;
  record[p.slots] = total;
  p.counts[b] = total;
  if (!active) return;
  p.anchors[b] = bonus;
  p.lengths[b] += total;
  p.starts[b] += total;
}

// blockIdx: part of a row, entry, sequence. p.features and the strides count units.
template <class Unit>
__global__ void __launch_bounds__(kThreads) round_commit_kernel(RoundCommitParams p) {
  const int64_t n = blockIdx.y, b = blockIdx.z;
  wait_for_predecessor();
  // Clamped: what the host could not check must not be read or written outside.
  const int accepted = min(p.num_accepted[b], p.slots - 1), source = in_block(p, p.index[b * p.slots + n]);
  const bool active = p.active[b] != 0;
  if (blockIdx.x == 0 && n == 0) commit(p, int(b), active, accepted);
  if (p.features_in == nullptr || !active || n > accepted) return;
  const Unit* in = static_cast<const Unit*>(p.features_in);
  const Unit* from = in + b * p.features_stride[0] + source * p.features_stride[1];
  Unit* to = static_cast<Unit*>(p.features_out) + (b * p.slots + n) * p.features;
  Unit units[kUnits];
  const int at = blockIdx.x * kThreads * kUnits + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (at + i * kThreads < p.features) units[i] = from[at + i * kThreads];
#pragma unroll
  for (int i = 0; i < kUnits; ++i)
    if (at + i * kThreads < p.features) to[at + i * kThreads] = units[i];
}

template <class Unit>
void run(RoundCommitParams p, Stream stream) {
  const int per_unit = p.features_in == nullptr ? 1 : int(sizeof(Unit)) / p.element_size;
  p.features /= per_unit, p.features_stride[0] /= per_unit, p.features_stride[1] /= per_unit;
  const int parts = (p.features + kThreads * kUnits - 1) / (kThreads * kUnits);
  const dim3 grid(parts > 0 ? parts : 1, p.features_in == nullptr ? 1 : p.slots, p.batch);
  launch("round_commit", round_commit_kernel<Unit>, grid, kThreads, 0, stream, p);
}

}  // namespace

void round_commit(const RoundCommitParams& p, Stream stream) {
  if (in_pieces(p.features_in, p.element_size, p.features, p.features_stride, 2) &&
      in_pieces(p.features_out, p.element_size, p.features, nullptr, 0))
    return run<uint4>(p, stream);
  return p.element_size == 4 ? run<uint32_t>(p, stream) : run<uint16_t>(p, stream);
}

}  // namespace pydflash::cuda
