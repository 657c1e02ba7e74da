// Products of block_attention on tensor cores, for 16-bit inputs: scores and sums in float, weights rounded to the
// storage type. A warp owns 16 folded rows and, where key groups are more than one, a part of each step's keys.
#pragma once

#include "cuda/block_attention_copy.cuh"
#include "cuda/tensor_core.cuh"

// wgmma exists on this one architecture alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PYDFLASH_WGMMA 1
#else
#define PYDFLASH_WGMMA 0
#endif

namespace pydflash::cuda {
namespace {

#if PYDFLASH_WGMMA
// Address of a tile in slabs of 128 swizzled bytes; groups of eight rows follow each other.
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t at) {
  return uint64_t((at & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

#define PYDFLASH_ROW(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define PYDFLASH_SUMS \
  PYDFLASH_ROW(0), PYDFLASH_ROW(1), PYDFLASH_ROW(2), PYDFLASH_ROW(3), PYDFLASH_ROW(4), PYDFLASH_ROW(5), \
      PYDFLASH_ROW(6), PYDFLASH_ROW(7)
#define PYDFLASH_WARPGROUP_MMA(type)                                                                               \
  "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                                       \
  " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "     \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "

// c (+)= a b^T for the 64 rows of a warpgroup, 64 rows of b and a depth of 16, asynchronously, from shared memory.
template <class T>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n" PYDFLASH_WARPGROUP_MMA("bf16") "%32, %33, p, 1, 1, 0, 0;}"
                 : PYDFLASH_SUMS
                 : "l"(a), "l"(b), "r"(int(add)));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n" PYDFLASH_WARPGROUP_MMA("f16") "%32, %33, p, 1, 1, 0, 0;}"
                 : PYDFLASH_SUMS
                 : "l"(a), "l"(b), "r"(int(add)));
}

// c += a b for the same rows and 64 columns of b, a in registers.
template <class T>
__device__ __forceinline__ void multiply_columns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile(PYDFLASH_WARPGROUP_MMA("bf16") "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : PYDFLASH_SUMS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile(PYDFLASH_WARPGROUP_MMA("f16") "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : PYDFLASH_SUMS
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef PYDFLASH_WARPGROUP_MMA
#undef PYDFLASH_SUMS
#undef PYDFLASH_ROW

// Keeps the compiler from moving uses of registers across the start or the end of asynchronous products.
__device__ __forceinline__ void pin(float (&c)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(c[i][e])::"memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#endif

template <class Type, int kHeadDim, int kRowGroups, int kKeyGroups_>
class TensorProducts {
 public:
  using T = Type;
  static constexpr int kDim = kHeadDim, kKeyGroups = kKeyGroups_;
  static constexpr int kRows = 16 * kRowGroups, kThreads = 32 * kRowGroups * kKeyGroups;
  static constexpr int kKeys = kDim > 128 ? 32 : 64, kStages = kDim > 64 ? 2 : 3;
  static constexpr int kMinBlocks = kThreads > 128 || kDim > 128 ? 1 : 2;
  static constexpr bool kWarpgroups = PYDFLASH_WGMMA && kRowGroups % 4 == 0 && kKeyGroups == 1 && kKeys == 64;

  __device__ __forceinline__ TensorProducts() {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums_[i / 8][i % 8][e] = 0;
  }

  // One step of keys: scores, weights, sums. seen(row): the keys that a row of the tile sees.
  template <class Seen, class WaitForValues>
  __device__ __forceinline__ void step(Place query, Place keys, Place values, float factor, bool partial, Seen seen,
                                       WaitForValues wait_for_values) {
    float scores[kWarpKeys / 8][4] = {};
    find_scores(scores, query.address, keys.address);
    if (factor <= 0) {  // else the largest score is not the largest product, or -inf becomes NaN
#pragma unroll
      for (int i = 0; i < kWarpKeys / 2; ++i) scores[i / 4][i % 4] *= factor;
      factor = 1;
    }
    if (partial) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t bits = seen(own_row(half)) >> (key_group() * kWarpKeys + lane() % 4 * 2);
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(bits >> (n * 8 + e) & 1)) scores[n][2 * half + e] = -INFINITY;
      }
    }
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n) top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(top_[half], top * factor);
      const float from = finite_top(top);
      decay[half] = exp2_fast(top_[half] - from);
      top_[half] = top;
      float total = 0;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          total += scores[n][e] = exp2_fast(fmaf(scores[n][e], factor, -from));
      total_[half] = total_[half] * decay[half] + total;
    }
    if (__any_sync(~0u, decay[0] != 1 || decay[1] != 1)) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[i / 8][i % 8][e] *= decay[e / 2];
    }
    wait_for_values();
    add_values(scores, values.address);
  }

  // Rows of kDim sums, top and total, kDim + 8 floats long; key groups behind each other.
  __device__ __forceinline__ void store(float* sums) {
    const int base = key_group() * kRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sums + (base + own_row(half)) * (kDim + 8);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i)
        *reinterpret_cast<float2*>(row + i * 8 + lane() % 4 * 2) =
            make_float2(sums_[i / 8][i % 8][2 * half], sums_[i / 8][i % 8][2 * half + 1]);
      float total = total_[half] + __shfl_xor_sync(~0u, total_[half], 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (lane() % 4 == 0) *reinterpret_cast<float2*>(row + kDim) = make_float2(top_[half], total);
    }
  }

 private:
  static constexpr int kWarpKeys = kKeys / kKeyGroups;

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int row_group() { return threadIdx.x / 32 % kRowGroups; }
  __device__ static int key_group() { return threadIdx.x / 32 / kRowGroups; }
  __device__ static int own_row(int half) { return row_group() * 16 + half * 8 + lane() / 4; }

  __device__ __forceinline__ void find_scores(float (&scores)[kWarpKeys / 8][4], uint32_t query, uint32_t keys) {
#if PYDFLASH_WGMMA
    if constexpr (kWarpgroups) {
      const uint32_t rows = query + row_group() / 4 * (64 * 128);
      begin_products();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        multiply_rows<T>(scores, tile_descriptor(rows + k / 4 * (kRows * 128) + k % 4 * 32),
                         tile_descriptor(keys + k / 4 * (kKeys * 128) + k % 4 * 32), k > 0);
      finish_products();
      pin(scores);
    } else
#endif
    {
      const int query_row = row_group() * 16 + lane() % 16;
      const int row = key_group() * kWarpKeys + lane() % 8 + lane() / 16 * 8, chunk = lane() / 8 % 2;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, query + tile_offset<kRows>(query_row, 2 * k + lane() / 16));
#pragma unroll
        for (int n = 0; n < kWarpKeys / 16; ++n) {
          uint32_t b[4];
          load_matrices(b, keys + tile_offset<kKeys>(row + n * 16, 2 * k + chunk));
          multiply<T>(scores[2 * n], a, b[0], b[1]);
          multiply<T>(scores[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(const float (&weights)[kWarpKeys / 8][4], uint32_t values) {
    uint32_t a[kWarpKeys / 16][4];
#pragma unroll
    for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[n / 2][n % 2 * 2 + half] = narrow_pair(T{}, weights[n][2 * half], weights[n][2 * half + 1]);
#if PYDFLASH_WGMMA
    if constexpr (kWarpgroups) {
#pragma unroll
      for (int slab = 0; slab < kDim / 64; ++slab) pin(sums_[slab]);
      begin_products();
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
        for (int slab = 0; slab < kDim / 64; ++slab)
          multiply_columns<T>(sums_[slab], a[n], tile_descriptor(values + slab * (kKeys * 128) + n * 2048));
      finish_products();
#pragma unroll
      for (int slab = 0; slab < kDim / 64; ++slab) pin(sums_[slab]);
    } else
#endif
    {
      const int row = key_group() * kWarpKeys + lane() % 16;
#pragma unroll
      for (int n = 0; n < kWarpKeys / 16; ++n)
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
          uint32_t b[4];
          load_transposed(b, values + tile_offset<kKeys>(row + n * 16, 2 * d + lane() / 16));
          multiply<T>(sums_[d / 4][d % 4 * 2], a[n], b[0], b[1]);
          multiply<T>(sums_[d / 4][d % 4 * 2 + 1], a[n], b[2], b[3]);
        }
    }
  }

  float sums_[kDim / 64][8][4];
  float top_[2] = {-INFINITY, -INFINITY}, total_[2] = {0, 0};  // total: of this lane's columns
};

}  // namespace
}  // namespace pydflash::cuda
