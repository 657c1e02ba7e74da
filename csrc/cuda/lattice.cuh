// The edges of a lattice as log-probabilities, all of one batch row at once; the definition stands in kernels.h.
#pragma once

#include "cuda/logit_rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kLatticeThreads = 1024, kMaxCandidates = 1024;
constexpr int kRowLanes = 16;  // that work on one row of scores
constexpr int64_t kSharedEdges = 36 * 1024;  // with a kernel's own, less than the 48 KB every launch may take

// Edges of one batch row, in shared memory where they fit. Row r is (slot, previous candidate).
struct Edges {
  float* value;   // [slots * rows, num_candidates]
  float* best;    // [slots * rows]: the largest of each row
  int32_t* next;  // [slots * rows], for what comes after
};

inline int64_t edge_bytes(const Lattice& lattice) {
  const int64_t rows = int64_t(lattice.slots) * lattice.rows;
  return (rows * (lattice.num_candidates + 2) * 4 + 255) & ~int64_t(255);
}

inline bool edges_are_shared(const Lattice& lattice) { return edge_bytes(lattice) <= kSharedEdges; }

inline int64_t edge_scratch(const Lattice& lattice) {
  return edges_are_shared(lattice) ? 0 : lattice.batch * edge_bytes(lattice);
}

// In shared memory, or where they do not fit in part b of scratch, of so many bytes.
__device__ __forceinline__ Edges edges_at(const Lattice& lattice, char* shared, void* scratch, int64_t bytes,
                                          int64_t b) {
  const int64_t rows = int64_t(lattice.slots) * lattice.rows;
  float* value = reinterpret_cast<float*>(bytes > 0 ? static_cast<char*>(scratch) + b * bytes : shared);
  return {value, value + rows * lattice.num_candidates,
          reinterpret_cast<int32_t*>(value + rows * (lattice.num_candidates + 1))};
}

__device__ __forceinline__ float edge_of(float score, float shift, float log_total) {
  if (!(score > -INFINITY)) return -INFINITY;
  return no_nan((score == shift ? 0.0f : score - shift) - log_total);
}

__device__ __forceinline__ const int64_t* candidates_of(const Lattice& lattice, int64_t b, int slot) {
  return lattice.candidates + (b * lattice.slots + slot) * lattice.num_candidates;
}

// The candidate of the lowest id among `chosen` and those of `equal`, which begin at `first`.
__device__ __noinline__ int lowest_id(const int64_t* ids, int chosen, int first, unsigned equal) {
  for (; equal != 0; equal &= equal - 1) {
    const int c = first + __ffs(int(equal)) - 1;
    if (ids[c] < ids[chosen] || (ids[c] == ids[chosen] && c < chosen)) chosen = c;
  }
  return chosen;
}

// For the whole block; ends with a barrier.
__device__ inline void fill_edges(const Lattice& lattice, int64_t b, const Edges& edges) {
  const int count = lattice.num_candidates, rows = lattice.slots * lattice.rows, lane = int(threadIdx.x) % kRowLanes;
  const float* scores = lattice.scores + b * rows * count;
  for (int64_t i = threadIdx.x; i < int64_t(rows) * count; i += blockDim.x) edges.value[i] = scores[i];
  __syncthreads();
  const int groups = int(blockDim.x) / kRowLanes;
  for (int first = 0; first < rows; first += groups) {
    // Groups behind the last row come along empty: every lane takes part in the shuffles.
    const int row = first + int(threadIdx.x) / kRowLanes, width = row < rows ? count : 0;
    float* value = edges.value + int64_t(row) * count;
    float top = -INFINITY;
    for (int c = lane; c < width; c += kRowLanes) top = fmaxf(top, value[c]);
#pragma unroll
    for (int step = kRowLanes / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    float shift = top, log_total = 0;
    if (lattice.log_normalizers != nullptr) {
      if (width > 0) shift = lattice.log_normalizers[b * lattice.slots + row];  // one row a slot
    } else {
      double total = 0;
      for (int c = lane; c < width; c += kRowLanes)
        if (const float x = value[c]; x > -INFINITY) total += x == top ? 1.0 : exp(double(x - top));
#pragma unroll
      for (int step = kRowLanes / 2; step > 0; step /= 2) total += __shfl_xor_sync(kAllLanes, total, step);
      log_total = float(log(total));
    }
    __syncwarp();
    for (int c = lane; c < width; c += kRowLanes) value[c] = edge_of(value[c], shift, log_total);
    if (lane == 0 && width > 0) edges.best[row] = edge_of(top, shift, log_total);
  }
  __syncthreads();
}

}  // namespace
}  // namespace pydflash::cuda
