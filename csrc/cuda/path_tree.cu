#include "cuda/lattice.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxSlots = 64, kWords = kMaxCandidates / 32;

// Node `slot` of a tree. Only one warp knows them, so what is read and written here costs no trip to global memory.
struct Nodes {
  uint64_t visibility[kMaxSlots];
  float log_prob[kMaxSlots];
  int parent[kMaxSlots], depth[kMaxSlots];
  int candidate[kMaxSlots];  // which candidate of its slot it is, -1 for a token that is none
  int row[kMaxSlots];        // where the children's edges begin
  unsigned taken[kMaxSlots][kWords];  // children that are nodes already
};

// The tree of one batch row, grown by one warp. Of every node's children only the best untaken one competes; lane l
// holds its value for the nodes l and l + 32, as an ordered integer, 0 where there is none.
class Tree {
 public:
  __device__ Tree(const PathTreeParams& p, int64_t b, const Edges& edges, Nodes& nodes)
      : p_(p), b_(b), edges_(edges), nodes_(nodes), lane_(lane_index()), count_(p.lattice.num_candidates) {}

  __device__ void grow() {
    if (lane_ == 0) nodes_.visibility[0] = 1, nodes_.parent[0] = -1, nodes_.candidate[0] = -1;
    place(0, 0, 0, 0.0f);
    for (int slot = 1; slot <= p_.trunk_nodes; ++slot) follow(slot);
#pragma unroll 1
    for (int slot = p_.trunk_nodes + 1; slot <= p_.num_nodes; ++slot) {
      const unsigned most = __reduce_max_sync(kAllLanes, max(value_[0], value_[1]));
      // Ties go to the shallower node, so to the shallower parent, and among those to the first.
      unsigned order = value_[1] == most ? unsigned(depth_[1]) << 8 | unsigned(lane_ + 32) : ~0u;
      if (value_[0] == most) order = min(order, unsigned(depth_[0]) << 8 | unsigned(lane_));
      take_best(int(__reduce_min_sync(kAllLanes, order) & 255), most, slot);
    }
  }

  __device__ void write() const {
    const int64_t first = b_ * (p_.num_nodes + 1);
    for (int slot = lane_; slot <= p_.num_nodes; slot += 32) {
      const int depth = nodes_.depth[slot], c = nodes_.candidate[slot];
      const int64_t* trunk = p_.trunk + b_ * p_.trunk_nodes;
      p_.tokens[first + slot] = c >= 0      ? candidates_of(p_.lattice, b_, depth - 1)[c]
                                : slot == 0 ? p_.anchors[b_]
                                            : trunk[slot - 1];
      p_.parents[first + slot] = nodes_.parent[slot];
      p_.depths[first + slot] = depth;
      p_.visibility[first + slot] = int64_t(nodes_.visibility[slot]);
      p_.log_probs[first + slot] = nodes_.log_prob[slot];
    }
  }

 private:
  // Of an untaken child, else 0.
  __device__ __forceinline__ unsigned child_value(int parent, int c) const {
    const bool there = c < count_ && (nodes_.taken[parent][c / 32] >> (c % 32) & 1) == 0;
    return there ? ordered(no_nan(nodes_.log_prob[parent] + edges_.value[nodes_.row[parent] + c])) : 0;
  }

  // The parent's best untaken child, whose value is `most`, becomes node `slot`.
  __device__ __forceinline__ void take_best(int parent, unsigned most, int slot) {
    const float log_prob = from_ordered(most);
    int chosen = -1, ties = 0;
    unsigned below = 0;
#pragma unroll 1
    for (int c = 0; c < count_; c += 32) {
      const unsigned value = child_value(parent, c + lane_);
      unsigned equal = __ballot_sync(kAllLanes, value == most);
      if (value != most) below = max(below, value);
      ties += __popc(int(equal));
      if (chosen < 0 && equal != 0) chosen = c + __ffs(int(equal)) - 1;
      if (ties > 1)
        chosen = lowest_id(candidates_of(p_.lattice, b_, nodes_.depth[parent]), chosen, c, equal);
    }
    if (ties <= 1) most = __reduce_max_sync(kAllLanes, below);
    add(parent, chosen, slot, most, log_prob);
  }

  // The next node of the trunk; all slots before it are trunk.
  __device__ void follow(int slot) {
    const int parent = slot - 1;
    const int64_t token = p_.trunk[b_ * p_.trunk_nodes + parent];
    const int64_t* ids = candidates_of(p_.lattice, b_, parent);
    int chosen = -1;
    for (int c = lane_; c - lane_ < count_ && chosen < 0; c += 32) {
      const unsigned equal = __ballot_sync(kAllLanes, c < count_ && ids[c] == token);
      if (equal != 0) chosen = c - lane_ + __ffs(int(equal)) - 1;
    }
    if (chosen < 0) {  // behind -inf every row gives -inf
      if (lane_ == 0) link(parent, slot, -1);
      return place(slot, slot, slot * p_.lattice.rows, -INFINITY);
    }
    unsigned most = 0;
    for (int c = lane_; c < count_; c += 32)
      if (c != chosen) most = max(most, child_value(parent, c));
    add(parent, chosen, slot, __reduce_max_sync(kAllLanes, most), from_ordered(child_value(parent, chosen)));
  }

  // Child `c` becomes node `slot`; the best of the parent's other children has the value `next`.
  __device__ __forceinline__ void add(int parent, int c, int slot, unsigned next, float log_prob) {
    const int depth = nodes_.depth[parent] + 1;
    set_value(parent, next);
    __syncwarp();
    if (lane_ == 0) {
      nodes_.taken[parent][c / 32] |= 1u << (c % 32);
      link(parent, slot, c);
    }
    place(slot, depth, depth * p_.lattice.rows + (p_.lattice.rows > 1 ? c : 0), log_prob);
  }

  __device__ __forceinline__ void link(int parent, int slot, int c) {
    nodes_.visibility[slot] = nodes_.visibility[parent] | uint64_t(1) << slot;
    nodes_.parent[slot] = parent, nodes_.candidate[slot] = c;
  }

  // `row` of the scores is the children's.
  __device__ __forceinline__ void place(int slot, int depth, int row, float log_prob) {
    if (lane_ == 0) {
      nodes_.depth[slot] = depth, nodes_.log_prob[slot] = log_prob;
      nodes_.row[slot] = row * count_;
    }
    set_value(slot, depth < p_.lattice.slots ? ordered(no_nan(log_prob + edges_.best[row])) : 0);
    if (lane_ == slot % 32) depth_[0] = slot < 32 ? depth : depth_[0], depth_[1] = slot < 32 ? depth_[1] : depth;
    __syncwarp();
  }

  __device__ __forceinline__ void set_value(int node, unsigned value) {
    if (lane_ == node % 32) value_[0] = node < 32 ? value : value_[0], value_[1] = node < 32 ? value_[1] : value;
  }

  const PathTreeParams& p_;
  const int64_t b_;
  const Edges edges_;
  Nodes& nodes_;
  const int lane_, count_;
  unsigned value_[2] = {};
  int depth_[2] = {};
};

__global__ void __launch_bounds__(kLatticeThreads) grow_trees(const PathTreeParams p, int64_t scratch_bytes) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Nodes nodes;
  release_successor();
  for (int i = int(threadIdx.x); i < kMaxSlots * kWords; i += int(blockDim.x)) nodes.taken[i / kWords][i % kWords] = 0;
  wait_for_predecessor();
  const int64_t b = blockIdx.x;
  const Edges edges = edges_at(p.lattice, memory, p.scratch, scratch_bytes, b);
  fill_edges(p.lattice, b, edges);
  if (warp_index() != 0) return;
  Tree tree(p, b, edges, nodes);
  tree.grow();
  __syncwarp();
  tree.write();
}

}  // namespace

int64_t scratch_bytes(const PathTreeParams& p) { return edge_scratch(p.lattice); }

void path_tree(const PathTreeParams& p, Stream stream) {
  const int64_t bytes = edge_bytes(p.lattice);
  const bool shared = edges_are_shared(p.lattice);
  launch("path_tree", grow_trees, dim3(unsigned(p.lattice.batch)), dim3(kLatticeThreads), shared ? size_t(bytes) : 0,
         stream, p, shared ? 0 : bytes);
}

}  // namespace pydflash::cuda
