// path_tree: the nodes of a lattice taken best first.
#pragma once

#include "sycl/kernels/lattice.hpp"

namespace pydflash::sycl_backend {

constexpr int kMaxSlots = 64, kWords = kMaxCandidates / 32;

// Node `slot` of a tree.
struct Nodes {
  uint64_t visibility[kMaxSlots];
  int64_t row[kMaxSlots];  // of edges: the children's
  float log_prob[kMaxSlots];
  int parent[kMaxSlots], depth[kMaxSlots];
  int candidate[kMaxSlots];   // which candidate of its slot it is, -1 for a token that is none
  uint32_t value[kMaxSlots];  // of its best child that is no node yet, as an ordered integer; 0 where there is none
  uint32_t taken[kMaxSlots][kWords];  // children that are nodes already
};

// The tree of one batch row, grown by a work-group: best one as small as a sub-group, whose barriers cost nothing.
// RTC common: GrowTrees
struct GrowTrees {
  const float *edges, *best;
  const int64_t* candidates;
  int slots, rows, num_candidates, num_nodes, trunk_nodes;
  const int64_t *trunk, *anchors;
  int64_t* tokens;
  int32_t *parents, *depths;
  int64_t* visibility;
  float* log_probs;
  ::sycl::local_accessor<Nodes, 1> memory;

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    Grower grower{*this, memory[0], team, int64_t(item.get_group(0)), team.thread(), team.size()};
    grower.grow();
    grower.write();
  }

 private:
  struct Grower {
    const GrowTrees& p;
    Nodes& nodes;
    const Team& team;
    int64_t b;
    int thread, threads;

    void grow() {
      for (int i = thread; i < kMaxSlots * kWords; i += threads) nodes.taken[i / kWords][i % kWords] = 0;
      if (thread == 0) nodes.visibility[0] = 1, nodes.parent[0] = -1, nodes.candidate[0] = -1;
      place(0, 0, 0, 0.0f);
      for (int slot = 1; slot <= p.trunk_nodes; ++slot) follow(slot);
      for (int slot = p.trunk_nodes + 1; slot <= p.num_nodes; ++slot) {
        // Ties go to the shallower node, so to the shallower parent, and among those to the first.
        uint64_t most = 0;
        for (int i = thread; i < slot; i += threads)
          most = ::sycl::max(most, uint64_t(nodes.value[i]) << 32 | ~uint32_t(nodes.depth[i] << 8 | i));
        most = team.largest(most);
        take_best(int(~uint32_t(most) & 255), uint32_t(most >> 32), slot);
      }
    }

    void write() const {
      const int64_t first = b * (p.num_nodes + 1);
      for (int slot = thread; slot <= p.num_nodes; slot += threads) {
        const int depth = nodes.depth[slot], c = nodes.candidate[slot];
        p.tokens[first + slot] = c >= 0      ? ids_of(depth - 1)[c]
                                 : slot == 0 ? p.anchors[b]
                                             : p.trunk[b * p.trunk_nodes + slot - 1];
        p.parents[first + slot] = nodes.parent[slot];
        p.depths[first + slot] = depth;
        p.visibility[first + slot] = int64_t(nodes.visibility[slot]);
        p.log_probs[first + slot] = nodes.log_prob[slot];
      }
    }

    const int64_t* ids_of(int slot) const { return p.candidates + (b * p.slots + slot) * p.num_candidates; }

    // Of an untaken child, else 0.
    uint32_t child_value(int parent, int c) const {
      if ((nodes.taken[parent][c / 32] >> (c % 32) & 1) != 0) return 0;
      return ordered(no_nan(nodes.log_prob[parent] + p.edges[nodes.row[parent] * p.num_candidates + c]));
    }

    // The parent's best untaken child, whose value is `most`, becomes node `slot`.
    void take_best(int parent, uint32_t most, int slot) {
      const int64_t* ids = ids_of(nodes.depth[parent]);
      int chosen = p.num_candidates, ties = 0;
      uint32_t below = 0;
      for (int c = thread; c < p.num_candidates; c += threads) {
        const uint32_t value = child_value(parent, c);
        if (value != most)
          below = ::sycl::max(below, value);
        else if (++ties == 1 || ids[c] < ids[chosen])
          chosen = c;
      }
      ties = team.sum(ties);
      if (ties > 1) {
        below = most;
        const int64_t id = chosen < p.num_candidates ? ids[chosen] : INT64_MAX;
        const int64_t lowest = team.least(id);
        if (id != lowest) chosen = p.num_candidates;
      }
      add(parent, team.least(chosen), slot, team.largest(below), from_ordered(most));
    }

    // The next node of the trunk; all slots before it are trunk.
    void follow(int slot) {
      const int parent = slot - 1;
      const int64_t token = p.trunk[b * p.trunk_nodes + parent];
      const int64_t* ids = ids_of(parent);
      int chosen = p.num_candidates;
      for (int c = thread; c < p.num_candidates; c += threads)
        if (ids[c] == token) chosen = ::sycl::min(chosen, c);
      chosen = team.least(chosen);
      if (chosen == p.num_candidates) {  // behind -inf every row gives -inf
        if (thread == 0) link(parent, slot, -1);
        return place(slot, slot, 0, -kInfinity);
      }
      uint32_t next = 0;
      for (int c = thread; c < p.num_candidates; c += threads)
        if (c != chosen) next = ::sycl::max(next, child_value(parent, c));
      add(parent, chosen, slot, team.largest(next), from_ordered(child_value(parent, chosen)));
    }

    // Child `c` becomes node `slot`; the best of the parent's other children has the value `next`.
    void add(int parent, int c, int slot, uint32_t next, float log_prob) {
      team.wait();
      if (thread == 0) {
        nodes.value[parent] = next;
        nodes.taken[parent][c / 32] |= 1u << (c % 32);
        link(parent, slot, c);
      }
      place(slot, nodes.depth[parent] + 1, p.rows > 1 ? c : 0, log_prob);
    }

    void link(int parent, int slot, int c) {
      nodes.visibility[slot] = nodes.visibility[parent] | uint64_t(1) << slot;
      nodes.parent[slot] = parent, nodes.candidate[slot] = c;
    }

    // `row` of the next slot's edges is the children's.
    void place(int slot, int depth, int row, float log_prob) {
      if (thread == 0) {
        const int64_t at = (b * p.slots + depth) * p.rows + row;
        nodes.depth[slot] = depth, nodes.log_prob[slot] = log_prob, nodes.row[slot] = at;
        nodes.value[slot] = depth < p.slots ? ordered(no_nan(log_prob + p.best[at])) : 0;
      }
      team.wait();
    }
  };
};

}  // namespace pydflash::sycl_backend
