// Edges of a lattice as log-probabilities; the definition stands in kernels.h.
#pragma once

#include "cpu/top_k.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

struct Normalizer {
  float shift, log_total;
};

PYDFLASH_FN float no_nan(float x) { return x == x ? x : -kInfinity; }

PYDFLASH_FN float edge_of(float score, Normalizer of) {
  if (!(score > -kInfinity)) return -kInfinity;
  return no_nan((score == of.shift ? 0.0f : score - of.shift) - of.log_total);
}

// The candidates of slot `slot` of batch row b.
PYDFLASH_FN const int64_t* candidates_of(const Lattice& lattice, int64_t b, int64_t slot) {
  return lattice.candidates + (b * lattice.slots + slot) * lattice.num_candidates;
}

PYDFLASH_FN const float* scores_of(const Lattice& lattice, int64_t b, int64_t slot, int64_t row) {
  return lattice.scores + ((b * lattice.slots + slot) * lattice.rows + row) * lattice.num_candidates;
}

inline Normalizer normalizer_of(const Lattice& lattice, int64_t b, int64_t slot, int64_t row) {
  if (lattice.log_normalizers != nullptr) return {lattice.log_normalizers[b * lattice.slots + slot], 0.0f};
  const float* scores = scores_of(lattice, b, slot, row);
  const float top = largest_of(scores, lattice.num_candidates);
  if (top == -kInfinity) return {0.0f, 0.0f};  // no edge of this row has any probability
  double total = 0;
  for (int c = 0; c < lattice.num_candidates; ++c) {
    const float x = scores[c];
    if (x > -kInfinity) total += x == top ? 1.0 : ::exp(double(x - top));
  }
  return {top, float(::log(total))};
}

// The index of the largest value, ties to the lower id, then to the first; NaN is passed over, and -1 where nothing
// else is left. Which value is the largest cannot be predicted, so only ties, which are rare, meet a branch.
template <class Id>
inline int best_of(const float* values, const Id* ids, int count) {
  const float top = largest_of(values, count);
  int last = -1, ties = 0;
#pragma omp simd reduction(max : last) reduction(+ : ties)
  for (int c = 0; c < count; ++c) {
    const bool tie = values[c] == top;
    last = tie && c > last ? c : last;
    ties += tie;
  }
  int best = last;
  if (ties > 1)
    for (int c = last - 1; c >= 0; --c)
      if (values[c] == top && ids[c] <= ids[best]) best = c;
  return best;
}

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
