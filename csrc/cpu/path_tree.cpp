#include "cpu/lattice.h"
#include "cpu/scratch.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kMaxNodes = 63;

// The tree of one batch row. Of every taken node's children only the best untaken one competes, so a step looks at
// one value a node and then fills two: the parent's next child and the new node's first.
class Tree {
 public:
  // `children`: [num_nodes, num_candidates]; `known`: [slots, rows].
  Tree(const PathTreeParams& p, int64_t b, float* children, Normalizer* known)
      : p_(p), b_(b), at_(b * (p.num_nodes + 1)), children_(children), known_(known) {
    for (int64_t i = 0; i < int64_t(p.lattice.slots) * p.lattice.rows; ++i) known_[i].log_total = NAN;
  }

  void grow() {
    p_.tokens[at_] = p_.anchors[b_], p_.parents[at_] = -1, p_.depths[at_] = 0;
    p_.visibility[at_] = 1, p_.log_probs[at_] = 0.0f;
    for (int slot = 1; slot <= p_.num_nodes; ++slot) {
      expand(slot - 1);
      if (slot <= p_.trunk_nodes) {
        follow(slot);
        continue;
      }
      // Ties go to the shallower node, so to the shallower parent, and among those to the first.
      const int parent = best_of(value_, p_.depths + at_, slot);
      take(parent, first_untaken_[parent], slot);
    }
  }

 private:
  // The cumulative log-probabilities of the children of a node; their NaNs are the children taken.
  void expand(int node) {
    const Lattice& lattice = p_.lattice;
    const int depth = p_.depths[at_ + node];
    value_[node] = NAN;
    if (depth == lattice.slots) return;
    const int row = depth == 0 || lattice.rows == 1 ? 0 : candidate_[node];
    Normalizer& of = known_[depth * lattice.rows + row];
    if (of.log_total != of.log_total) of = normalizer_of(lattice, b_, depth, row);
    const float* scores = scores_of(lattice, b_, depth, row);
    float* values = children_ + int64_t(node) * lattice.num_candidates;
    for (int c = 0; c < lattice.num_candidates; ++c)
      values[c] = no_nan(p_.log_probs[at_ + node] + edge_of(scores[c], of));
    advance(node);
  }

  void advance(int node) {
    const float* values = children_ + int64_t(node) * p_.lattice.num_candidates;
    const int best = best_of(values, candidates_of(p_.lattice, b_, p_.depths[at_ + node]), p_.lattice.num_candidates);
    first_untaken_[node] = best;
    value_[node] = best < 0 ? NAN : values[best];
  }

  // The next node of the trunk; all slots before it are trunk.
  void follow(int slot) {
    const int64_t token = p_.trunk[b_ * p_.trunk_nodes + slot - 1];
    const int64_t* candidates = candidates_of(p_.lattice, b_, slot - 1);
    int c = 0;
    while (c < p_.lattice.num_candidates && candidates[c] != token) ++c;
    if (c < p_.lattice.num_candidates) return take(slot - 1, c, slot);
    candidate_[slot] = 0;  // behind a node of -inf every row gives -inf
    put(slot - 1, slot, token, -kInfinity);
  }

  void take(int parent, int c, int slot) {
    float& value = children_[int64_t(parent) * p_.lattice.num_candidates + c];
    candidate_[slot] = c;
    put(parent, slot, candidates_of(p_.lattice, b_, p_.depths[at_ + parent])[c], value);
    value = NAN;
    advance(parent);
  }

  void put(int parent, int slot, int64_t token, float log_prob) {
    p_.tokens[at_ + slot] = token;
    p_.parents[at_ + slot] = parent;
    p_.depths[at_ + slot] = p_.depths[at_ + parent] + 1;
    p_.visibility[at_ + slot] = int64_t(uint64_t(p_.visibility[at_ + parent]) | uint64_t(1) << slot);
    p_.log_probs[at_ + slot] = log_prob;
  }

  const PathTreeParams& p_;
  const int64_t b_, at_;  // the batch row, and its first slot in the outputs
  float* const children_;
  Normalizer* const known_;           // of every row of scores, NaN until it is needed
  int candidate_[kMaxNodes + 1];      // which candidate of its slot a node is: its children's row of scores
  int first_untaken_[kMaxNodes + 1];  // candidate index of the best untaken child
  float value_[kMaxNodes + 1];        // its cumulative log-probability, NaN where there is none
};

}  // namespace

void path_tree(const PathTreeParams& p, Stream) {
  const int64_t children = int64_t(p.num_nodes) * p.lattice.num_candidates;
  const int64_t known = int64_t(p.lattice.slots) * p.lattice.rows;
  const int threads = threads_for(p.lattice.batch * children, 1 << 13);
  const Scratch scratch(4 * children + int64_t(sizeof(Normalizer)) * known + 128, threads);
  in_shares(p.lattice.batch, threads, [&](int64_t begin, int64_t end, int thread) {
    char* part = scratch.part(thread);
    float* values = carve<float>(part, children);
    Normalizer* normalizers = carve<Normalizer>(part, known);
    for (int64_t b = begin; b < end; ++b) Tree(p, b, values, normalizers).grow();
  });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
