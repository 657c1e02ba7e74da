// path_viterbi: the best path through all slots of a lattice.
#pragma once

#include "sycl/kernels/lattice.hpp"

namespace pydflash::sycl_backend {

// From the last slot to the first: tails[c] is the best log-probability of what follows candidate c. A work-group has
// a batch row, a work-item some rows of a slot. Independent slots have one row, whose best edge depends on nothing
// else: there the work-items take slots, and one adds them up.
// RTC common: FindPaths
struct FindPaths {
  const float* edges;  // [batch, slots, rows, num_candidates]
  const int64_t* candidates;
  int slots, rows, num_candidates;
  int32_t* next;  // [batch, slots, rows]
  int64_t* tokens;
  float* log_probs;
  ::sycl::local_accessor<float, 1> tails;  // [2, rows], or [slots]

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    const int64_t first = int64_t(item.get_group(0)) * slots;
    float tail = 0;
    if (rows == 1) {
      for (int slot = team.thread(); slot < slots; slot += team.size()) tails[slot] = best_edge(first + slot, 0, 0);
      team.wait();
      for (int slot = slots - 1; slot >= 0; --slot) tail = no_nan(tail + tails[slot]);
    } else {
      for (int row = team.thread(); row < rows; row += team.size()) tails[row] = 0;
      team.wait();
      int from = 0;
      for (int slot = slots - 1; slot >= 0; --slot, from = rows - from) {
        for (int row = team.thread(); row < (slot == 0 ? 1 : rows); row += team.size())
          tails[rows - from + row] = best_edge(first + slot, row, from);
        team.wait();
      }
      tail = tails[from];
    }
    if (team.thread() != 0) return;
    log_probs[item.get_group(0)] = tail;
    for (int slot = 0, row = 0; slot < slots; ++slot) {
      const int chosen = next[(first + slot) * rows + row];
      tokens[first + slot] = candidates[(first + slot) * num_candidates + chosen];
      row = rows > 1 ? chosen : 0;
    }
  }

 private:
  // The best continuation of a row, whose value it returns; ties go to the lower id, then to the first. What follows
  // each candidate stands in `tails` from `behind` on.
  float best_edge(int64_t slot, int row, int behind) const {
    const float* edge = edges + (slot * rows + row) * num_candidates;
    const int64_t* ids = candidates + slot * num_candidates;
    const auto value_of = [&](int c) { return rows > 1 ? no_nan(edge[c] + tails[behind + c]) : edge[c]; };
    int chosen = 0;
    float most = value_of(0);
    for (int c = 1; c < num_candidates; ++c) {
      const float here = value_of(c);
      if (here > most || (here == most && ids[c] < ids[chosen])) most = here, chosen = c;
    }
    next[slot * rows + row] = chosen;
    return most;
  }
};

}  // namespace pydflash::sycl_backend
