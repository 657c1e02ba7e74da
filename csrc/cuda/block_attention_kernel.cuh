// The kernels of block_attention: one block of threads per sequence, KV head, tile of folded rows and split of the
// context, and the merge of the splits where no cluster does it.
#pragma once

#include "cuda/block_attention_copy.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxStages = 8;

// Shared memory: what the slots see and the barriers, the query, then as many stages as the plan has. A partial result
// takes the place of query and stages.
template <class Products>
struct Layout {
  static constexpr int kElement = int(sizeof(typename Products::T));
  static constexpr int kHeadBytes = 1024;
  static constexpr int kQueryBytes = Products::kRows * Products::kDim * kElement;
  static constexpr int kTileBytes = Products::kKeys * Products::kDim * kElement, kStageBytes = 2 * kTileBytes;
  static constexpr int kSumStride = Products::kDim + 8;  // top and total follow the columns; no bank conflicts
  static constexpr int kSums = Products::kRows * kSumStride;
  static constexpr int bytes(int stages) { return kHeadBytes + kQueryBytes + stages * kStageBytes; }
  // A partial result, and what a block of a cluster receives from the others.
  static constexpr int merge_bytes(bool cluster) { return (Products::kKeyGroups + cluster) * kSums * int(sizeof(float)); }
  static_assert(merge_bytes(false) <= kQueryBytes + Products::kStages * kStageBytes, "a partial result fits");
  static_assert(sizeof(SlotLimits) + (kMaxStages + 2) * sizeof(uint64_t) <= kHeadBytes, "the head fits");
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Starts copying shared memory to the same place, or another, of a block of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void send(const float* to, const float* from, int bytes, uint64_t* barrier, int rank) {
  uint32_t remote_to, remote_barrier;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_to) : "r"(shared_address(to)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   remote_to),
               "r"(shared_address(from)), "r"(bytes), "r"(remote_barrier)
               : "memory");
}
#else
__device__ __forceinline__ void arrive_at_cluster() {}
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ void send(const float*, const float*, int, uint64_t*, int) {}
#endif

// From the partial result in shared memory to the output or, where other splits cannot be reached, to scratch.
template <class Products>
__device__ __forceinline__ void merge_and_store(const BlockAttentionParams& p, const AttentionPlan& plan, float* sums,
                                                uint64_t* barrier, const RowTile& tile, int split, int64_t unit,
                                                int context_steps) {
  using T = typename Products::T;
  constexpr int kLanes = Products::kDim / 4, kStride = Layout<Products>::kSumStride, kSums = Layout<Products>::kSums;
  constexpr int kPass = Products::kThreads / kLanes;  // rows at a time
  const int column = threadIdx.x % kLanes * 4, lane_row = threadIdx.x / kLanes;
  const auto stats_of = [](const float* row) { return *reinterpret_cast<const float2*>(row + Products::kDim); };
  const auto columns_of = [&](const float* row) { return *reinterpret_cast<const float4*>(row + column); };
  if constexpr (Products::kKeyGroups > 1) {
    static_assert(kLanes <= 32, "a row is merged by one warp: its statistics are read before they are replaced");
    for (int base = 0; base < tile.rows; base += kPass) {
      float* row = sums + (base + lane_row) * kStride;
      const Partial partial = merge<Products::kKeyGroups>(
          Products::kKeyGroups, [&](int g) { return stats_of(row + g * kSums); },
          [&](int g) { return columns_of(row + g * kSums); });
      *reinterpret_cast<float4*>(row + column) = partial.sums;
      if (column == 0) *reinterpret_cast<float2*>(row + Products::kDim) = partial.stats;
    }
    if (plan.splits > 1) fence_async();
    __syncthreads();
  }
  if (plan.splits > 1 && !plan.cluster) {
    const int64_t base = (unit * plan.splits + split) * Products::kRows;
    for (int i = lane_row; i < tile.rows; i += kPass) {
      const float* row = sums + i * kStride;
      if (stats_of(row).x > -INFINITY)
        *reinterpret_cast<float4*>(plan.sums + (base + i) * Products::kDim + column) = columns_of(row);
      if (column == 0) plan.stats[base + i] = stats_of(row);
    }
    return;
  }
  // Each block of a cluster merges its share of the rows, sent to it by the splits that had work.
  const int share = max(Products::kRows >> plan.split_bits, 1), first = split * share;
  const int active = min(context_steps, plan.splits - 1);  // and the last one, which has the block
  const float* received = sums;
  if (plan.splits > 1) {
    float* inbox = sums + Products::kKeyGroups * kSums;
    const int bytes = share * kStride * int(sizeof(float));
    arrive_at_cluster();
    if (threadIdx.x == 0 && first < tile.rows) expect_bytes(barrier, (active + 1) * bytes);
    wait_for_cluster();  // all have left their stages, where the inbox is
    const int rank = threadIdx.x;
    if (rank < plan.splits && rank * share < tile.rows && (split < active || split == plan.splits - 1))
      send(inbox + split * share * kStride, sums + rank * share * kStride, bytes, barrier, rank);
    if (first < tile.rows) wait_for_bytes(barrier, 0);
    __syncwarp();
    arrive_at_cluster();
    received = inbox;
  }
  const int rows = min(share, tile.rows - first);
  for (int base = 0; base < rows; base += kPass) {
    const int row = min(base + lane_row, share - 1);
    const auto at = [&](int s) { return received + (s * share + row) * kStride; };
    const Partial partial = merge<kMaxSplits>(
        plan.splits,
        [&](int s) { return s < active || s == plan.splits - 1 ? stats_of(at(s)) : make_float2(-INFINITY, 0); },
        [&](int s) { return columns_of(at(s)); });
    if (base + lane_row < rows && column < p.head_dim)
      store_columns<T>(p, plan, tile, first + row, column, partial);
  }
  if (plan.splits > 1) wait_for_cluster();  // until all that this block sent has arrived
}

// grid: row tiles x splits, KV heads, sequences.
template <class Products>
__global__ void __launch_bounds__(Products::kThreads, Products::kMinBlocks)
    attend(const __grid_constant__ BlockAttentionParams p, const __grid_constant__ AttentionPlan plan,
           const __grid_constant__ AttentionMaps maps) {
  using T = typename Products::T;
  using Memory = Layout<Products>;
  constexpr int kKeys = Products::kKeys, kRows = Products::kRows, kDim = Products::kDim;
  constexpr int kThreads = Products::kThreads;
  extern __shared__ __align__(1024) char memory[];
  SlotLimits& limits = *reinterpret_cast<SlotLimits*>(memory);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + sizeof(SlotLimits));
  char* query = memory + Memory::kHeadBytes;
  char* stages = query + Memory::kQueryBytes;
  const bool bulk = kBulkCopies && plan.bulk;
  const int split = blockIdx.x & (plan.splits - 1);
  const RowTile tile(p, plan, int(blockIdx.x) >> plan.split_bits, blockIdx.y, blockIdx.z);
  const int capacity = int(min(p.capacity, int64_t(INT32_MAX - 256)));
  // The block itself is the first work of the last split.
  const int block_steps = split == plan.splits - 1 ? ceil_div(p.slots, kKeys) : 0;
  release_successor();
  if (bulk && threadIdx.x == 0) {
    prefetch_map(maps.query), prefetch_map(maps.k_cache), prefetch_map(maps.v_cache);
#pragma unroll
    for (int i = 0; i < kMaxStages + 2; ++i) init_barrier(barriers + i);
    fence_barriers();
  }
  wait_for_predecessor();
  const int length = p.lengths[tile.batch];

  const auto copy = [&](auto tile_rows, char* to, const RowsInMemory<T>& from, int rows) {
    constexpr int kTileRows = decltype(tile_rows)::value;
    if (!kBulkCopies && plan.aligned)
      copy_tile<kTileRows, kDim, kThreads, T>(to, from, rows, p.head_dim);
    else
      copy_elements<kTileRows, kDim, kThreads, T>(to, from, rows, p.head_dim);
  };
  // Starts the copies of a step: of the block, or of the cache from `cache_row` on.
  const auto load = [&](int step, int stage, int cache_row) {
    const bool block = step < block_steps;
    const int row = block ? step * kKeys : cache_row;
    char* keys = stages + stage * Memory::kStageBytes;
    char* values = keys + Memory::kTileBytes;
    if (bulk) {
      if (threadIdx.x != 0) return;
      uint64_t* barrier = barriers + stage;
      expect_bytes(barrier, Memory::kStageBytes);
      bulk_copy_tile<kKeys, kDim, T>(keys, block ? maps.k_block : maps.k_cache, row, tile.kv_head, tile.batch, barrier);
      bulk_copy_tile<kKeys, kDim, T>(values, block ? maps.v_block : maps.v_cache, row, tile.kv_head, tile.batch,
                                     barrier);
    } else {
      const auto one = [&](char* to, const void* data, const int64_t (&stride)[3]) {
        const T* first = static_cast<const T*>(data) + tile.batch * stride[0] + tile.kv_head * stride[1] +
                         row * stride[2];
        copy(std::integral_constant<int, kKeys>{}, to, {first, 0, stride[2], 0, 0},
             (block ? p.slots : capacity) - row);
      };
      one(keys, block ? p.k_block : p.k_cache, block ? p.k_block_stride : p.k_cache_stride);
      one(values, block ? p.v_block : p.v_cache, block ? p.v_block_stride : p.v_cache_stride);
      commit_copies();
    }
  };
  if (!bulk) {
    const T* first = static_cast<const T*>(p.q) + tile.batch * p.q_stride[0] + tile.head * p.q_stride[1] +
                     tile.slot * p.q_stride[2];
    copy(std::integral_constant<int, kRows>{}, query,
         {first, p.q_stride[1], p.q_stride[2], plan.per_slot, plan.tile_slots}, tile.rows);
  } else if (threadIdx.x == 0) {
    expect_bytes(barriers + kMaxStages, plan.tile_slots * plan.tile_heads * kDim * int(sizeof(T)));
    bulk_copy_tile<kRows, kDim, T>(query, maps.query, tile.slot, tile.head, tile.batch, barriers + kMaxStages);
  }
  // Without a window the first steps are the same for every length, so they are on their way before it is known.
  int ahead = 0;
  if (p.window == 0) {
    const int known = min(block_steps + (split * kKeys < capacity ? 1 : 0), plan.stages);
    for (; ahead < known; ++ahead) load(ahead, ahead, split * kKeys);
  }
  limits.fill(p, tile.batch, length, block_steps > 0);
  __syncthreads();
  const Context context(p, length, limits, kKeys);
  const auto cache_row = [&](int step) {
    const int row = (context.start + split + (step - block_steps) * plan.splits) * kKeys;
    return row < capacity ? row : row - ceil_div(capacity, kKeys) * kKeys;
  };
  const int steps = block_steps + ((max(0, context.steps - split) + plan.splits - 1) >> plan.split_bits);
  const int known = ahead;
  for (; ahead < plan.stages; ++ahead)
    if (ahead < steps)
      load(ahead, ahead, cache_row(ahead));
    else if (!bulk)
      commit_copies();

  unsigned parity = 0;
  const auto wait_for_stage = [&](int stage) {
    if (bulk) {
      wait_for_bytes(barriers + stage, parity);
    } else {
      wait_for_copies<Products::kStages - 1>();
      fence_async();
      __syncthreads();
    }
  };
  Products products;
  if (bulk) wait_for_bytes(barriers + kMaxStages, 0);
  for (int step = 0, stage = 0; step < steps; ++step) {
    wait_for_stage(stage);
    const bool block = step < block_steps;
    const int row = block ? step * kKeys : cache_row(step);
    const bool partial = block || !context.complete(row, kKeys);
    const char* keys = stages + stage * Memory::kStageBytes;
    if (partial) {
      // Value rows that no slot sees may hold NaN, which a weight of zero does not undo.
      const uint64_t seen = block ? limits.all_bits(p.slots) >> row : context.seen(row, context.lowest);
      const uint64_t unseen = low_bits(min(kKeys, (block ? p.slots : capacity) - row)) & ~seen;
      if (unseen != 0) {
        constexpr int kChunks = kDim * Memory::kElement / 16;
        for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads)
          if (unseen >> (i / kChunks) & 1)
            *reinterpret_cast<uint4*>(stages + stage * Memory::kStageBytes + Memory::kTileBytes +
                                      tile_offset<kKeys>(i / kChunks, i % kChunks)) = uint4{};
        fence_async();
        __syncthreads();
      }
    }
    products.step(query, keys, keys + Memory::kTileBytes, p.scale * kLog2e, partial, [&](int r) {
      const int slot = tile.slot_of(plan, r);
      return block ? limits.bits[slot] >> row : context.seen(row, limits.first[slot]);
    });
    __syncthreads();
    if (step + plan.stages < steps)
      load(step + plan.stages, stage, cache_row(step + plan.stages));
    else if (!bulk)
      commit_copies();
    if (++stage == plan.stages) stage = 0, parity ^= 1;
  }
  // A step that came before its length was known may not be wanted; its copy must still have ended.
  if (!bulk)
    wait_for_copies<0>();
  else if (known > steps)
    wait_for_bytes(barriers + steps, 0);
  __syncthreads();
  float* sums = reinterpret_cast<float*>(query);
  products.store(sums);
  if (plan.splits > 1) fence_async();
  __syncthreads();
  const int64_t unit = (int64_t(tile.batch) * p.num_kv_heads + tile.kv_head) * plan.row_tiles +
                       (blockIdx.x >> plan.split_bits);
  merge_and_store<Products>(p, plan, sums, barriers + kMaxStages + 1, tile, split, unit, context.steps);
}

// grid: row tiles x passes over their rows, KV heads, sequences.
template <class T>
__global__ void __launch_bounds__(128) merge_partials(const __grid_constant__ BlockAttentionParams p,
                                                      const __grid_constant__ AttentionPlan plan) {
  release_successor();
  wait_for_predecessor();
  const int lanes = plan.columns / 4, pass = int(blockDim.x) / lanes, passes = plan.rows / pass;
  const int index = blockIdx.x / passes;
  const RowTile tile(p, plan, index, blockIdx.y, blockIdx.z);
  const int row = blockIdx.x % passes * pass + threadIdx.x / lanes, column = threadIdx.x % lanes * 4;
  if (blockIdx.x % passes * pass >= tile.rows) return;
  const int64_t unit = (int64_t(tile.batch) * p.num_kv_heads + tile.kv_head) * plan.row_tiles + index;
  const auto at = [&](int s) { return (unit * plan.splits + s) * plan.rows + min(row, tile.rows - 1); };
  const Partial partial = merge<kMaxSplits>(
      plan.splits, [&](int s) { return plan.stats[at(s)]; },
      [&](int s) { return *reinterpret_cast<const float4*>(plan.sums + at(s) * plan.columns + column); });
  if (row < tile.rows && column < p.head_dim) store_columns<T>(p, plan, tile, row, column, partial);
}

}  // namespace
}  // namespace pydflash::cuda
