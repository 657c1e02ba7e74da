// How block_attention is cut up and what its slots see. The query heads of a KV head are folded into the rows
// (head, slot) of a tile; a context is cut into steps of cache rows that the splits take in turn, so that the first
// steps of all splits lie side by side. Keys and values are read once per tile of rows: in 16 bits that is
// 4 head_dim bytes per position and KV head, for 4 head_dim operations with each of the group's slots.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "cuda/cuda.cuh"

namespace pydflash::cuda {

constexpr int kMaxSplits = 16;  // of a context; a lane each in the merge

// Fixed by shapes alone: one captured launch serves every length.
struct AttentionPlan {
  int group, splits, split_bits, stages;
  int rows, columns;  // of a tile in memory, both padded
  int row_tiles, slot_tiles, tile_heads, tile_slots;
  float per_slot;  // 1 / tile_slots
  bool aligned;    // every row starts on 16 bytes
  bool bulk;       // tiles are copied by the tensor maps
  float* sums;     // scratch [unit, split, row, column], a unit being a row tile of a KV head of a sequence
  float2* stats;   // scratch [unit, split, row]: largest scaled score, sum of the weights
};

struct AttentionMaps {
  CUtensorMap query, k_cache, v_cache, k_block, v_block;
};

// Instantiated in one file per storage type.
template <class T>
void block_attention_of(const BlockAttentionParams& p, Stream stream);
template <class T>
int64_t block_attention_scratch(const BlockAttentionParams& p, int device);

namespace {

constexpr float kLog2e = 1.4426950408889634f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The rows of one tile: of which sequence, KV head, query heads and slots.
struct RowTile {
  int batch, kv_head, head, slot, rows;  // head and slot: of the first row; rows: that exist

  __device__ RowTile(const BlockAttentionParams& p, const AttentionPlan& plan, int tile, int kv_head, int batch)
      : batch(batch), kv_head(kv_head), head(tile * plan.tile_heads), slot(0) {
    if (plan.slot_tiles > 1) {  // then a tile is a part of one head
      head = tile / plan.slot_tiles, slot = tile % plan.slot_tiles * plan.tile_slots;
      rows = min(plan.tile_slots, p.slots - slot);
    } else {
      rows = min(plan.tile_heads, plan.group - head) * plan.tile_slots;
    }
    head += kv_head * plan.group;
  }

  __device__ __forceinline__ int head_of(const AttentionPlan& plan, int row) const {
    return head + int((row + 0.5f) * plan.per_slot);
  }
  __device__ __forceinline__ int slot_of(const AttentionPlan& plan, int row) const {
    return slot + row - int((row + 0.5f) * plan.per_slot) * plan.tile_slots;
  }
};

// Position of the first context key that a slot of this depth sees.
__device__ __forceinline__ int first_position(const BlockAttentionParams& p, int length, int depth) {
  int64_t first = length > p.capacity ? length - p.capacity : 0;
  if (p.window > 0) first = max(first, int64_t(length) + depth - p.window + 1);
  return int(min(first, int64_t(length)));
}

// Block keys that slot i sees: its bits, of slots that exist, inside the window.
__device__ inline uint64_t visible_slots(const BlockAttentionParams& p, int batch, int i) {
  const int32_t* depths = p.depths + batch * p.depths_stride;
  uint64_t bits = uint64_t(p.visibility[batch * p.visibility_stride + i]) & (~uint64_t(0) >> (64 - p.slots));
  if (p.window > 0)
#pragma unroll 1
    for (int j = 0; j < p.slots; ++j)
      if (llabs(int64_t(depths[i]) - depths[j]) >= p.window) bits &= ~(uint64_t(1) << j);
  return bits;
}

// What each slot sees, in shared memory.
struct SlotLimits {
  uint64_t bits[64];
  int first[64];
  int length;

  __device__ __forceinline__ void fill(const BlockAttentionParams& p, int batch, int length, bool block) {
    if (int i = threadIdx.x; i < p.slots) {
      if (block) bits[i] = visible_slots(p, batch, i);
      first[i] = first_position(p, length, p.window > 0 ? p.depths[batch * p.depths_stride + i] : 0);
    }
  }

  // By a whole warp: the block keys that any slot sees.
  __device__ __forceinline__ uint64_t all_bits(int slots) const {
    const int lane = threadIdx.x % 32;
    const uint64_t mine = (lane < slots ? bits[lane] : 0) | (lane + 32 < slots ? bits[lane + 32] : 0);
    const uint64_t high = __reduce_or_sync(~0u, unsigned(mine >> 32));
    return high << 32 | __reduce_or_sync(~0u, unsigned(mine));
  }
};

// The n lowest bits.
__device__ __forceinline__ uint64_t low_bits(int n) {
  return n <= 0 ? 0 : n >= 64 ? ~uint64_t(0) : (uint64_t(1) << n) - 1;
}

// The cache as a ring: its rows before `wrap` were written last, row 0 at position `turn`.
struct Context {
  int capacity, wrap, turn;
  int lowest, highest;  // of the slots' first positions
  int start, steps;     // first step that holds a seen row, and the number of steps from there on

  // By whole warps; with a window `limits` must be filled.
  __device__ __forceinline__ Context(const BlockAttentionParams& p, int length, const SlotLimits& limits, int keys) {
    capacity = int(min(p.capacity, int64_t(INT32_MAX - 256)));
    wrap = length < capacity ? length : capacity > 0 ? length % capacity : 0;
    turn = length - wrap;
    start = 0;
    const int all = ceil_div(capacity, keys);
    if (p.window > 0) {
      const int lane = threadIdx.x % 32, other = lane + 32 < p.slots ? lane + 32 : 0;
      const int one = limits.first[lane < p.slots ? lane : 0], two = limits.first[other];
      lowest = __reduce_min_sync(~0u, min(one, two));
      highest = __reduce_max_sync(~0u, max(one, two));
      const bool wraps = lowest < turn;
      start = (lowest - turn + (wraps ? capacity : 0)) / keys;
      steps = min(all, ceil_div(wrap, keys) - start + (wraps ? all : 0));
      if (lowest >= length) steps = 0;
    } else {
      lowest = highest = first_position(p, length, 0);
      steps = ceil_div(min(length, capacity), keys);
    }
  }

  // Whether every slot sees all of these rows.
  __device__ __forceinline__ bool complete(int row, int keys) const {
    const int oldest = row + keys > wrap ? turn + max(row, wrap) - capacity : turn + row;
    return row + keys <= capacity && oldest >= highest;
  }

  // Of the 64 rows from `row` on those whose positions are `first` or later: rows of this turn of the ring, then of
  // the turn before.
  __device__ __forceinline__ uint64_t seen(int row, int first) const {
    const int newer = first - turn - row, older = max(wrap - row, newer + capacity);
    return (low_bits(wrap - row) & ~low_bits(newer)) | (low_bits(capacity - row) & ~low_bits(older));
  }
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What is subtracted before exp2: a row without keys so far has top -inf.
__device__ __forceinline__ float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

}  // namespace
}  // namespace pydflash::cuda
