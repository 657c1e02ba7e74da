// Products of block_attention in float: a warp owns eight folded rows, a lane one key of a step and some columns.
#pragma once

#include "cuda/block_attention_copy.cuh"

namespace pydflash::cuda {
namespace {

template <int kHeadDim>
class FloatProducts {
 public:
  using T = float;
  static constexpr int kDim = kHeadDim, kKeyGroups = 1;
  static constexpr int kRows = 32, kThreads = 128, kKeys = 32, kStages = kDim > 128 ? 1 : 2, kMinBlocks = 1;
  static constexpr bool kWarpgroups = false;

  __device__ __forceinline__ FloatProducts() {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      top_[r] = -INFINITY, total_[r] = 0;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums_[r][c] = 0;
    }
  }

  template <class Seen, class WaitForValues>
  __device__ __forceinline__ void step(Place query_, Place keys_, Place values_, float factor, bool partial,
                                       Seen seen, WaitForValues wait_for_values) {
    const char *query = query_.pointer, *keys = keys_.pointer, *values = values_.pointer;
    float scores[kWarpRows] = {};
#pragma unroll 4
    for (int c = 0; c < kDim / 4; ++c) {
      const float4 key = *reinterpret_cast<const float4*>(keys + tile_offset<kKeys>(lane(), c));
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float4 q = *reinterpret_cast<const float4*>(query + tile_offset<kRows>(own_row(r), c));
        scores[r] = fmaf(q.x, key.x, fmaf(q.y, key.y, fmaf(q.z, key.z, fmaf(q.w, key.w, scores[r]))));
      }
    }
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      float score = scores[r] * factor;
      if (partial && !(seen(own_row(r)) >> lane() & 1)) score = -INFINITY;
      float top = fmaxf(top_[r], score);
#pragma unroll
      for (int other = 16; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
      const float from = finite_top(top), decay = exp2_fast(top_[r] - from);
      scores[r] = exp2_fast(score - from);
      total_[r] = total_[r] * decay + scores[r];
      top_[r] = top;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums_[r][c] *= decay;
    }
    wait_for_values();
#pragma unroll 4
    for (int k = 0; k < kKeys; ++k) {
      float value[kColumns];
      load_columns(value, values, k);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const float weight = __shfl_sync(~0u, scores[r], k);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums_[r][c] = fmaf(weight, value[c], sums_[r][c]);
      }
    }
  }

  __device__ __forceinline__ void store(float* sums) {
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      float* row = sums + own_row(r) * (kDim + 8);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) row[column(c)] = sums_[r][c];
      float total = total_[r];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) total += __shfl_xor_sync(~0u, total, other);
      if (lane() == 0) *reinterpret_cast<float2*>(row + kDim) = make_float2(top_[r], total);
    }
  }

 private:
  static constexpr int kWarpRows = 8, kColumns = kDim / 32;
  static constexpr int kRun = kColumns < 4 ? kColumns : 4;  // columns of a lane that lie together

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int own_row(int r) { return threadIdx.x / 32 * kWarpRows + r; }
  __device__ static int column(int c) { return c / kRun * (32 * kRun) + lane() * kRun + c % kRun; }

  __device__ static void load_columns(float (&value)[kColumns], const char* values, int key) {
    using Words = std::conditional_t<kRun == 2, float2, float4>;
#pragma unroll
    for (int c = 0; c < kColumns; c += kRun)
      *reinterpret_cast<Words*>(value + c) = *reinterpret_cast<const Words*>(
          values + tile_offset<kKeys>(key, column(c) / 4) + column(c) % 4 * int(sizeof(float)));
  }

  float sums_[kWarpRows][kColumns];
  float top_[kWarpRows], total_[kWarpRows];  // total: of this lane's keys
};

}  // namespace
}  // namespace pydflash::cuda
