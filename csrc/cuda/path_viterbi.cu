#include "cuda/lattice.cuh"

namespace pydflash::cuda {
namespace {

// The best of a row's values in a group of kRowLanes lanes, ties to the lower id, then to the first; by whole warps.
struct Best {
  float value;
  int index;

  __device__ __forceinline__ bool loses_to(float other, int c, const int64_t* ids) const {
    if (other != value || index == INT32_MAX) return other > value || index == INT32_MAX;
    return c != index && (ids[c] < ids[index] || (ids[c] == ids[index] && c < index));
  }
};

// From the last slot to the first: tail[c] is the best log-probability of what follows candidate c. Independent slots
// have one row, and what follows does not depend on the choice.
__global__ void __launch_bounds__(kLatticeThreads) find_paths(const PathViterbiParams p, int64_t scratch_bytes) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float tails[2][kMaxCandidates];
  release_successor();
  wait_for_predecessor();
  const Lattice& lattice = p.lattice;
  const int64_t b = blockIdx.x;
  const int count = lattice.top_k, thread = int(threadIdx.x), lane = thread % kRowLanes;
  const bool behind = lattice.rows > 1;  // scores depend on the candidate before
  const Edges edges = edges_at(lattice, scratch_bytes > 0 ? static_cast<char*>(p.scratch) + b * scratch_bytes : memory);
  for (int row = thread; row < lattice.rows; row += int(blockDim.x)) tails[0][row] = 0.0f;
  fill_edges(lattice, b, edges);
  int turn = 0;
  for (int slot = lattice.slots - 1; slot >= 0; --slot, turn ^= 1) {
    const int rows = slot == 0 ? 1 : lattice.rows, groups = int(blockDim.x) / kRowLanes;
    const int64_t* ids = candidates_of(lattice, b, slot);
    for (int first = 0; first < rows; first += groups) {
      const int wanted = first + thread / kRowLanes, row = min(wanted, rows - 1);
      if (first + thread / 32 * (32 / kRowLanes) >= rows) break;  // the whole warp has no row
      const float* value = edges.value + int64_t(slot * lattice.rows + row) * count;
      Best best{-INFINITY, INT32_MAX};
      for (int c = lane; c < count; c += kRowLanes) {
        const float here = behind ? no_nan(value[c] + tails[turn][c]) : value[c];
        if (best.loses_to(here, c, ids)) best = {here, c};
      }
#pragma unroll
      for (int step = kRowLanes / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, best.value, step);
        const int c = __shfl_xor_sync(kAllLanes, best.index, step);
        if (c != INT32_MAX && best.loses_to(other, c, ids)) best = {other, c};
      }
      if (lane == 0 && wanted < rows) {
        edges.next[slot * lattice.rows + row] = best.index;
        tails[turn ^ 1][row] = behind ? best.value : no_nan(tails[turn][row] + best.value);
      }
    }
    __syncthreads();
  }
  if (thread != 0) return;
  p.log_probs[b] = tails[turn][0];
  for (int slot = 0, row = 0; slot < lattice.slots; ++slot) {
    const int chosen = edges.next[slot * lattice.rows + row];
    p.tokens[b * lattice.slots + slot] = candidates_of(lattice, b, slot)[chosen];
    row = behind ? chosen : 0;
  }
}

}  // namespace

int64_t scratch_bytes(const PathViterbiParams& p) { return edge_scratch(p.lattice); }

void path_viterbi(const PathViterbiParams& p, Stream stream) {
  const int64_t bytes = edge_bytes(p.lattice);
  const bool shared = edges_are_shared(p.lattice);
  launch("path_viterbi", find_paths, dim3(unsigned(p.lattice.batch)), dim3(kLatticeThreads), shared ? size_t(bytes) : 0,
         stream, p, shared ? 0 : bytes);
}

}  // namespace pydflash::cuda
