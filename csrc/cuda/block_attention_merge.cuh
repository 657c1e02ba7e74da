// Shared memory of block_attention's blocks of threads, and how the partial results of splits become the output.
#pragma once

#include "cuda/block_attention_copy.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxStages = 8;

// Barriers of eight bytes each. Values are still on their way while keys are multiplied.
enum Barrier : int {
  kQueryCame,
  kKeysCame,
  kValuesCame = kKeysCame + kMaxStages,
  kStageEmpty = kValuesCame + kMaxStages,
  kBarriers = kStageEmpty + kMaxStages
};

// Shared memory: what the slots see, the barriers, the query, then as many stages as the plan has. A partial result
// takes the place of query and stages.
template <class Products>
struct Layout {
  using T = typename Products::T;
  static constexpr int kBarrierBytes = int(sizeof(SlotLimits)), kHeadBytes = 1024;
  static constexpr int kQueryBytes = Products::kRows * Products::kDim * int(sizeof(T));
  static constexpr int kTileBytes = Products::kKeys * Products::kDim * int(sizeof(T)), kStageBytes = 2 * kTileBytes;
  static constexpr int kSumStride = Products::kDim + 8;  // top and total follow the columns; no bank conflicts
  static constexpr int kSumBytes = Products::kRows * kSumStride * int(sizeof(float));
  static constexpr int bytes(int stages) { return kHeadBytes + kQueryBytes + stages * kStageBytes; }
  static_assert(Products::kKeyGroups * kSumBytes <= kQueryBytes + Products::kStages * kStageBytes,
                "the partial results of the key groups fit");
  static_assert(kBarrierBytes + 8 * kBarriers <= kHeadBytes, "the head fits");
};

// Four columns of a row, as sums relative to 2^top, and what divides them.
struct Partial {
  float4 sums;
  float2 stats;  // top, total
};

// Parts of a row weighted and summed in a fixed order, by groups of 16 lanes that share the row. All parts are loaded
// before the first is used, and before it is known which have keys.
template <int kMax, class StatsAt, class SumsAt>
__device__ __forceinline__ Partial merge(int parts, StatsAt stats_at, SumsAt sums_at) {
  const int lane = threadIdx.x % 32, mine = lane % 16;
  const float2 stats = mine < parts ? stats_at(mine) : make_float2(-INFINITY, 0);
  const unsigned used = __ballot_sync(~0u, stats.x > -INFINITY) >> (lane & 16);
  float4 sums[kMax];
#pragma unroll
  for (int i = 0; i < kMax; ++i)
    if (i < parts) sums[i] = sums_at(i);
  float top = stats.x;
#pragma unroll
  for (int other = 8; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
  const float weight = exp2_fast(stats.x - finite_top(top));
  float total = weight * stats.y;
#pragma unroll
  for (int other = 8; other > 0; other /= 2) total += __shfl_xor_sync(~0u, total, other);
  float4 merged = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kMax; ++i) {
    const float w = __shfl_sync(~0u, weight, i, 16);
    if (used >> i & 1) {
      merged.x = fmaf(w, sums[i].x, merged.x), merged.y = fmaf(w, sums[i].y, merged.y);
      merged.z = fmaf(w, sums[i].z, merged.z), merged.w = fmaf(w, sums[i].w, merged.w);
    }
  }
  return {merged, make_float2(top, total)};
}

// Four columns of a row of a tile, normalised, to the output; zeros where no key was seen.
template <class T>
__device__ __forceinline__ void store_columns(const BlockAttentionParams& p, const AttentionPlan& plan,
                                              const RowTile& tile, int row, int column, const Partial& partial) {
  T* out = static_cast<T*>(p.out) + tile.batch * p.out_stride[0] + tile.head_of(plan, row) * p.out_stride[1] +
           tile.slot_of(plan, row) * p.out_stride[2] + column;
  struct alignas(4 * sizeof(T)) Four {
    T x[4];
  };
  const float4 sums = partial.sums;
  const float factor = partial.stats.y > 0 ? __frcp_rn(partial.stats.y) : 0;
  const Four narrow{from_float<T>(sums.x * factor), from_float<T>(sums.y * factor), from_float<T>(sums.z * factor),
                    from_float<T>(sums.w * factor)};
  if (plan.aligned)
    *reinterpret_cast<Four*>(out) = narrow;
  else
    for (int e = 0; e < 4; ++e) out[e] = narrow.x[e];
}

// From the partial result in shared memory to the output or, where others have a part of the context, to scratch.
template <class Products>
__device__ __forceinline__ void store_partial(const BlockAttentionParams& p, const AttentionPlan& plan, float* sums,
                                              const RowTile& tile, int split, int64_t unit) {
  using T = typename Products::T;
  constexpr int kLanes = Products::kDim / 4, kStride = Layout<Products>::kSumStride;
  constexpr int kGroup = Products::kRows * kStride, kPass = Products::kThreads / kLanes;  // kPass rows at a time
  const int column = threadIdx.x % kLanes * 4;
  const int64_t base = (unit * plan.splits + split) * Products::kRows;
  for (int first = 0; first < tile.rows; first += kPass) {
    const int i = first + threadIdx.x / kLanes;
    const float* row = sums + i * kStride;
    const auto stats_of = [&](int g) { return *reinterpret_cast<const float2*>(row + g * kGroup + Products::kDim); };
    const auto columns_of = [&](int g) { return *reinterpret_cast<const float4*>(row + g * kGroup + column); };
    Partial partial;
    if constexpr (Products::kKeyGroups > 1)
      partial = merge<Products::kKeyGroups>(Products::kKeyGroups, stats_of, columns_of);
    else
      partial = {columns_of(0), stats_of(0)};
    if (i >= tile.rows) continue;
    if (plan.splits == 1) {
      if (column < p.head_dim) store_columns<T>(p, plan, tile, i, column, partial);
    } else {
      *reinterpret_cast<float4*>(plan.sums + (base + i) * Products::kDim + column) = partial.sums;
      if (column == 0) plan.stats[base + i] = partial.stats;
    }
  }
}

// grid: row tiles x passes over their rows, KV heads, sequences.
template <class T>
__global__ void __launch_bounds__(128) merge_partials(const __grid_constant__ BlockAttentionParams p,
                                                      const __grid_constant__ AttentionPlan plan) {
  release_successor();
  const int lanes = plan.columns / 4, pass = int(blockDim.x) / lanes, passes = plan.rows / pass;
  const int index = blockIdx.x / passes;
  const RowTile tile(p, plan, index, blockIdx.y, blockIdx.z);
  const int row = blockIdx.x % passes * pass + threadIdx.x / lanes, column = threadIdx.x % lanes * 4;
  if (blockIdx.x % passes * pass >= tile.rows) return;
  const int64_t unit = (int64_t(tile.batch) * p.num_kv_heads + tile.kv_head) * plan.row_tiles + index;
  const auto at = [&](int s) { return (unit * plan.splits + s) * plan.rows + min(row, tile.rows - 1); };
  wait_for_predecessor();
  const Partial partial = merge<kMaxSplits>(
      plan.splits, [&](int s) { return plan.stats[at(s)]; },
      [&](int s) { return *reinterpret_cast<const float4*>(plan.sums + at(s) * plan.columns + column); });
  if (row < tile.rows && column < p.head_dim) store_columns<T>(p, plan, tile, row, column, partial);
}

}  // namespace
}  // namespace pydflash::cuda
