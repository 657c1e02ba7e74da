#include "cuda/lattice.cuh"

namespace pydflash::cuda {
namespace {

// From the last slot to the first: tail[c] is the best log-probability of what follows candidate c. Independent slots
// have one row, and what follows does not depend on the choice. A warp finds the best continuation of a row.
__global__ void __launch_bounds__(kLatticeThreads) find_paths(const PathViterbiParams p, int64_t scratch_bytes) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float tails[2][kMaxCandidates];
  release_successor();
  wait_for_predecessor();
  const Lattice& lattice = p.lattice;
  const int64_t b = blockIdx.x;
  const int count = lattice.num_candidates, lane = lane_index();
  const bool behind = lattice.rows > 1;  // scores depend on the candidate before
  const Edges edges = edges_at(lattice, memory, p.scratch, scratch_bytes, b);
  for (int row = int(threadIdx.x); row < lattice.rows; row += int(blockDim.x)) tails[0][row] = 0.0f;
  fill_edges(lattice, b, edges);
  if (warp_index() >= lattice.rows) return;
  int turn = 0;
  for (int slot = lattice.slots - 1; slot >= 0; --slot, turn ^= 1) {
    const int64_t* ids = candidates_of(lattice, b, slot);
    for (int row = warp_index(); row < (slot == 0 ? 1 : lattice.rows); row += num_warps()) {
      const int at = slot * lattice.rows + row;
      const float* value = edges.value + at * count;
      unsigned most = 0;
      int chosen = -1;
      for (int c = 0; c < count; c += 32) {
        const int i = c + lane;
        unsigned here = 0;
        if (i < count) here = ordered(behind ? no_nan(value[i] + tails[turn][i]) : value[i]);
        const unsigned top = __reduce_max_sync(kAllLanes, here);
        if (top < most) continue;
        const unsigned equal = __ballot_sync(kAllLanes, here == top);
        if (top > most) chosen = c + __ffs(int(equal)) - 1;
        if (top == most || (equal & (equal - 1)) != 0) chosen = lowest_id(ids, chosen, c, equal);
        most = top;
      }
      if (lane == 0) {
        edges.next[at] = chosen;
        tails[turn ^ 1][row] = behind ? from_ordered(most) : no_nan(tails[turn][row] + from_ordered(most));
      }
    }
    __syncthreads();
  }
  if (warp_index() != 0) return;
  if (lane == 0) {
    p.log_probs[b] = tails[turn][0];
    for (int slot = 0, row = 0; slot < lattice.slots; ++slot) {
      const int chosen = edges.next[slot * lattice.rows + row];
      edges.next[slot * lattice.rows] = chosen;
      row = behind ? chosen : 0;
    }
  }
  __syncwarp();
  for (int slot = lane; slot < lattice.slots; slot += 32)
    p.tokens[b * lattice.slots + slot] = candidates_of(lattice, b, slot)[edges.next[slot * lattice.rows]];
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
