// What the threads of a block work out together, always in the same order: reductions, the end of a prefix, sorting.
// Each step runs once or twice a launch, when its instructions are not in the cache yet: few of them, shared by all.
#pragma once

#include "cuda/cuda.cuh"

namespace pydflash::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxWarps = 16;

__device__ __forceinline__ int lane_index() { return int(threadIdx.x % 32); }
__device__ __forceinline__ int warp_index() { return int(threadIdx.x / 32); }
__device__ __forceinline__ int num_warps() { return int(blockDim.x / 32); }

// Shared memory through which the warps of a block exchange their parts.
struct Exchange {
  unsigned words[kMaxWarps];
  double parts[kMaxWarps], total, threshold, before;
  int first, last, index;
};

__device__ __noinline__ unsigned block_max(unsigned x, Exchange& shared) {
  x = __reduce_max_sync(kAllLanes, x);
  if (lane_index() == 0) shared.words[warp_index()] = x;
  __syncthreads();
  x = __reduce_max_sync(kAllLanes, lane_index() < num_warps() ? shared.words[lane_index()] : 0u);
  __syncthreads();
  return x;
}

__device__ __noinline__ unsigned block_sum(unsigned x, Exchange& shared) {
  x = __reduce_add_sync(kAllLanes, x);
  if (lane_index() == 0) shared.words[warp_index()] = x;
  __syncthreads();
  x = __reduce_add_sync(kAllLanes, lane_index() < num_warps() ? shared.words[lane_index()] : 0u);
  __syncthreads();
  return x;
}

// What a sum over neighbouring items must come to: more than share * total, or that at least. Without `whole` the
// total is that of all items.
struct Mark {
  double share, whole;
  bool at_least;

  __device__ static Mark beyond(double share) { return {share, -1.0, false}; }
};

// Each thread brings the sum of its items; leaves in `shared` the total, the threshold, and in first (or, where no
// thread reaches the mark, last) the thread whose items hold it. Returns the sum before this thread's items.
__device__ __noinline__ double split(double sum, Mark mark, Exchange& shared) {
  const int thread = int(threadIdx.x);
  double scan = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(kAllLanes, scan, step);
    if (lane_index() >= step) scan += other;
  }
  double before = __shfl_up_sync(kAllLanes, scan, 1);
  if (lane_index() == 0) before = 0;
  if (lane_index() == 31) shared.parts[warp_index()] = scan;
  if (thread == 0) shared.first = INT32_MAX, shared.last = -1;
  __syncthreads();
  double total = 0, ahead = 0;
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) {
    if (w == warp_index()) ahead = total;
    if (w < num_warps()) total += shared.parts[w];
  }
  before += ahead;
  double threshold = mark.share * (mark.whole < 0 ? total : mark.whole);
  // At least x is more than the number before x.
  if (mark.at_least) threshold = threshold > 0 ? bit_cast<double>(bit_cast<int64_t>(threshold) - 1) : -1.0;
  const unsigned positive = __ballot_sync(kAllLanes, sum > 0);
  const unsigned hits = __ballot_sync(kAllLanes, sum > 0 && before + sum > threshold);
  if (lane_index() == 0) {
    if (hits != 0) atomicMin(&shared.first, thread + __ffs(int(hits)) - 1);
    if (positive != 0) atomicMax(&shared.last, thread + 31 - __clz(int(positive)));
    if (thread == 0) shared.total = total, shared.threshold = threshold;
  }
  __syncthreads();
  return before;
}

struct Crossing {
  int index;  // -1 where no item has any amount
  double before, total;
};

// The first of `count` items with whose amount the sum reaches the mark, or the last of a positive amount. Threads take
// neighbouring items, so amount(i) is called once or twice for each.
template <class Amount>
__device__ __forceinline__ Crossing cross(int count, Amount amount, Mark mark, Exchange& shared) {
  const int thread = int(threadIdx.x), each = (count + int(blockDim.x) - 1) / int(blockDim.x);
  const int begin = min(thread * each, count), end = min(begin + each, count);
  double sum = 0;
#pragma unroll 1
  for (int i = begin; i < end; ++i) sum += amount(i);
  double before = split(sum, mark, shared);
  const int last = shared.last, first = shared.first;
  if (last < 0) return {-1, 0, 0};
  if (thread == (first < INT32_MAX ? first : last)) {
    double from = before;
    int chosen = begin;
#pragma unroll 1
    for (int i = begin; i < end && !(before > shared.threshold); ++i) {
      const double here = amount(i);
      if (!(here > 0)) continue;
      from = before, chosen = i;
      before += here;
    }
    shared.index = chosen, shared.before = from;
  }
  __syncthreads();
  return {shared.index, shared.before, shared.total};
}

// Sorts distinct keys from the largest to the smallest; more than kRanked of them are at most as many as `keys` has
// room for, and that is a power of two.
constexpr int kRanked = 128;  // no more than threads in a block

__device__ __noinline__ void sort_descending(uint64_t* keys, int count) {
  const int thread = int(threadIdx.x);
  if (count <= kRanked) {  // by counting what comes before
    const uint64_t key = thread < count ? keys[thread] : 0;
    int rank = 0;
    if (thread < count) {
#pragma unroll 4
      for (int i = 0; i < count; ++i) rank += keys[i] > key;
    }
    __syncthreads();
    if (thread < count) keys[rank] = key;
    __syncthreads();
    return;
  }
  int size = 2 * kRanked;
  while (size < count) size *= 2;
  for (int i = count + thread; i < size; i += int(blockDim.x)) keys[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = thread; i < size / 2; i += int(blockDim.x)) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const uint64_t left = keys[a], right = keys[b];
        if ((left < right) == ((a & run) == 0)) keys[a] = right, keys[b] = left;
      }
      // Up to a distance of 32 a warp meets its own 64 keys only.
      if (step > 32 || (step == 1 && run >= 64))
        __syncthreads();
      else
        __syncwarp();
    }
  }
  __syncthreads();
}

}  // namespace
}  // namespace pydflash::cuda
