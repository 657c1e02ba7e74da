#include "cpu/lattice.h"
#include "cpu/scratch.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// From the last slot to the first: `tail[c]` is the best log-probability of what follows candidate c, `next` the
// best continuation of every row. Independent slots have one row, and what follows does not depend on the choice.
void best_path(const PathViterbiParams& p, int64_t b, float* tail, float* head, float* values, int32_t* next) {
  const Lattice& lattice = p.lattice;
  const bool edges = lattice.rows > 1;
  for (int row = 0; row < lattice.rows; ++row) tail[row] = 0.0f;
  for (int slot = lattice.slots - 1; slot >= 0; --slot) {
    const int rows = slot == 0 ? 1 : lattice.rows;
    const int64_t* ids = candidates_of(lattice, b, slot);
    for (int row = 0; row < rows; ++row) {
      const Normalizer of = normalizer_of(lattice, b, slot, row);
      const float* scores = scores_of(lattice, b, slot, row);
      for (int c = 0; c < lattice.num_candidates; ++c)
        values[c] = edges ? no_nan(edge_of(scores[c], of) + tail[c]) : edge_of(scores[c], of);
      const int best = best_of(values, ids, lattice.num_candidates);
      next[slot * lattice.rows + row] = best;
      head[row] = edges ? values[best] : no_nan(tail[row] + values[best]);
    }
    float* swapped = tail;
    tail = head, head = swapped;
  }
  p.log_probs[b] = tail[0];
  int row = 0;
  for (int slot = 0; slot < lattice.slots; ++slot) {
    const int chosen = next[slot * lattice.rows + row];
    p.tokens[b * lattice.slots + slot] = candidates_of(lattice, b, slot)[chosen];
    row = edges ? chosen : 0;
  }
}

}  // namespace

void path_viterbi(const PathViterbiParams& p, Stream) {
  const int64_t rows = p.lattice.rows, choices = p.lattice.slots * rows;
  const int threads = threads_for(p.lattice.batch * choices * p.lattice.num_candidates, 1 << 14);
  const Scratch scratch(4 * (2 * rows + p.lattice.num_candidates + choices) + 256, threads);
  in_shares(p.lattice.batch, threads, [&](int64_t begin, int64_t end, int thread) {
    char* part = scratch.part(thread);
    float* tail = carve<float>(part, rows);
    float* head = carve<float>(part, rows);
    float* values = carve<float>(part, p.lattice.num_candidates);
    int32_t* next = carve<int32_t>(part, choices);
    for (int64_t b = begin; b < end; ++b) best_path(p, b, tail, head, values, next);
  });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
