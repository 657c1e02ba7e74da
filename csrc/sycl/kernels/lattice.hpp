// The edges of a lattice as log-probabilities; the definition stands in kernels.h.
#pragma once

#include "sycl/kernels/logit_rows.hpp"
#include "sycl/kernels/team.hpp"

namespace pydflash::sycl_backend {

constexpr int kMaxCandidates = 1024;

inline float edge_of(float score, float shift, float log_total) {
  if (!(score > -kInfinity)) return -kInfinity;
  return no_nan((score == shift ? 0.0f : score - shift) - log_total);
}

// A work-item normalises one row of scores. The sum of exponentials is one of integers, so it has no order.
// RTC common: FillEdges
struct FillEdges {
  const float *scores, *log_normalizers;
  int num_candidates;
  int64_t count;       // of rows: (slot, previous candidate)
  float *edges, *best;  // [count, num_candidates]; [count]: the largest of each row

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const float* row = scores + at * num_candidates;
    float top = -kInfinity;
    for (int c = 0; c < num_candidates; ++c) top = row[c] > top ? row[c] : top;
    float shift = top, log_total = 0;
    if (log_normalizers != nullptr) {
      shift = log_normalizers[at];  // one row a slot
    } else if (top > -kInfinity) {
      uint64_t total = 0;
      for (int c = 0; c < num_candidates; ++c)
        if (row[c] > -kInfinity) total += exp_term(row[c] == top ? 0.0f : row[c] - top);
      log_total = log_of_terms(total);
    }
    for (int c = 0; c < num_candidates; ++c) edges[at * num_candidates + c] = edge_of(row[c], shift, log_total);
    best[at] = edge_of(top, shift, log_total);
  }
};

}  // namespace pydflash::sycl_backend
