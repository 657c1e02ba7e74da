// The kernel of block_attention: a block of threads per sequence, KV head, tile of rows and split of the context.
#pragma once

#include "cuda/block_attention_merge.cuh"

namespace pydflash::cuda {
namespace {

// The steps of one split: every so many of the context, then, in the last split, those of the block.
struct Steps {
  int context, all, first, stride, wrapped;

  __device__ __forceinline__ Steps(const AttentionPlan& plan, const Context& rows, int split, int block, int keys)
      : context((max(0, rows.steps - split) + plan.splits - 1) >> plan.split_bits), all(context + block),
        first((rows.start + split) * keys), stride(keys << plan.split_bits),
        wrapped(ceil_div(rows.capacity, keys) * keys) {}

  __device__ __forceinline__ bool in_block(int step) const { return step >= context; }

  // First block slot or cache row of a step.
  __device__ __forceinline__ int row(int step, int keys, int capacity) const {
    if (in_block(step)) return (step - context) * keys;
    const int row = first + step * stride;
    return row < capacity ? row : row - wrapped;
  }
};

// The copies of a block of threads, by a warp of its own. Cache and lengths are older than the kernel before this one
// (what changes them releases no successor), so without a window the first steps do not wait for its end.
template <class Products>
__device__ __forceinline__ void produce(const BlockAttentionParams& p, const AttentionPlan& plan,
                                        const AttentionMaps& maps, const RowTile& tile, int split, int block_steps,
                                        int capacity, SlotLimits& limits, uint32_t memory) {
  using T = typename Products::T;
  using Memory = Layout<Products>;
  constexpr int kKeys = Products::kKeys, kDim = Products::kDim;
  const uint32_t barriers = memory + Memory::kBarrierBytes, query = memory + Memory::kHeadBytes;
  const bool leader = threadIdx.x % 32 == 0, windowed = p.window > 0;
  const auto load = [&](bool block, int stage, int row) {
    if (!leader) return;
    const uint32_t keys = query + Memory::kQueryBytes + stage * Memory::kStageBytes;
    const uint32_t came = barriers + 8 * (kKeysCame + stage);
    arrive_expecting(came, Memory::kTileBytes);
    bulk_copy_tile<kKeys, kDim, T>(keys, block ? maps.k_block : maps.k_cache, row, tile.kv_head, tile.batch, came);
    arrive_expecting(came + 8 * kMaxStages, Memory::kTileBytes);
    bulk_copy_tile<kKeys, kDim, T>(keys + Memory::kTileBytes, block ? maps.v_block : maps.v_cache, row, tile.kv_head,
                                   tile.batch, came + 8 * kMaxStages);
  };
  if (windowed) wait_for_predecessor(), __syncthreads();
  const int length = __ldcg(p.lengths + tile.batch);
  const Context context(p, length, limits, kKeys);
  const Steps steps(plan, context, split, block_steps, kKeys);
  const int early = windowed ? 0 : min(steps.context, plan.stages);
#pragma unroll 1
  for (int step = 0; step < early; ++step) load(false, step, steps.row(step, kKeys, capacity));
  if (!windowed) {
    if (leader) limits.length = length;
    __syncthreads();
    wait_for_predecessor();
  }
  if (leader) {
    arrive_expecting(barriers + 8 * kQueryCame, plan.tile_slots * plan.tile_heads * kDim * int(sizeof(T)));
    bulk_copy_tile<Products::kRows, kDim, T>(query, maps.query, tile.slot, tile.head, tile.batch,
                                             barriers + 8 * kQueryCame);
  }
  unsigned parity = 1;  // a stage that was never filled passes for empty
#pragma unroll 1
  for (int step = 0, stage = 0; step < steps.all; ++step) {
    if (step >= early) {
      wait_for_phase(barriers + 8 * (kStageEmpty + stage), parity);
      load(steps.in_block(step), stage, steps.row(step, kKeys, capacity));
    }
    if (++stage == plan.stages) stage = 0, parity ^= 1;
  }
}

// The same by all threads, a step at a time.
template <class Products>
__device__ __forceinline__ void copy_step(const BlockAttentionParams& p, const AttentionPlan& plan,
                                          const RowTile& tile, bool block, int row, int capacity, char* keys) {
  using T = typename Products::T;
  const auto one = [&](char* to, const void* data, const int64_t (&stride)[3]) {
    const T* first = static_cast<const T*>(data) + tile.batch * stride[0] + tile.kv_head * stride[1] +
                     row * stride[2];
    copy_tile<Products::kKeys, Products::kDim, Products::kThreads, T>(
        to, {first, 0, stride[2], 0, 0}, (block ? p.slots : capacity) - row, p.head_dim, plan.aligned);
  };
  char* values = keys + Layout<Products>::kTileBytes;
  one(keys, block ? p.k_block : p.k_cache, block ? p.k_block_stride : p.k_cache_stride);
  one(values, block ? p.v_block : p.v_cache, block ? p.v_block_stride : p.v_cache_stride);
}

template <class Products>
__device__ __forceinline__ void copy_query(const BlockAttentionParams& p, const AttentionPlan& plan,
                                           const RowTile& tile, char* query) {
  using T = typename Products::T;
  const T* first = static_cast<const T*>(p.q) + tile.batch * p.q_stride[0] + tile.head * p.q_stride[1] +
                   tile.slot * p.q_stride[2];
  copy_tile<Products::kRows, Products::kDim, Products::kThreads, T>(
      query, {first, p.q_stride[1], p.q_stride[2], plan.per_slot, plan.tile_slots}, tile.rows, p.head_dim,
      plan.aligned);
}

// Zeroes value rows: where no slot sees them they may hold NaN, which a weight of zero does not undo.
template <class Products>
__device__ __forceinline__ void clear_rows(char* values, uint64_t rows) {
  constexpr int kChunks = Products::kDim * int(sizeof(typename Products::T)) / 16;
#pragma unroll 1
  for (int i = threadIdx.x; i < Products::kKeys * kChunks; i += Products::kThreads)
    if (rows >> (i / kChunks) & 1)
      *reinterpret_cast<uint4*>(values + tile_offset<Products::kKeys>(i / kChunks, i % kChunks)) = uint4{};
  fence_async();
  sync_consumers<Products::kThreads>();
}

// grid: row tiles x splits, KV heads, sequences. Threads: those of the products and, with bulk copies, one more warp.
template <class Products>
__global__ void __launch_bounds__(Products::kThreads + 32, Products::kMinBlocks)
    attend(const __grid_constant__ BlockAttentionParams p, const __grid_constant__ AttentionPlan plan,
           const __grid_constant__ AttentionMaps maps) {
  using Memory = Layout<Products>;
  constexpr int kKeys = Products::kKeys, kThreads = Products::kThreads;
  extern __shared__ __align__(1024) char start[];
  const Place memory{start, shared_address(start)};
  SlotLimits& limits = *reinterpret_cast<SlotLimits*>(start);
  const uint32_t barriers = memory.address + Memory::kBarrierBytes;
  const Place query = memory + Memory::kHeadBytes, stages = query + Memory::kQueryBytes;
  const bool bulk = kBulkCopies && plan.bulk;
  const int split = blockIdx.x & (plan.splits - 1), index = int(blockIdx.x) >> plan.split_bits;
  const RowTile tile(p, plan, index, blockIdx.y, blockIdx.z);
  const int capacity = int(min(p.capacity, int64_t(INT32_MAX - 256)));
  const int block_steps = split == plan.splits - 1 ? ceil_div(p.slots, kKeys) : 0;
  release_successor();
  if (kBulkCopies) {
    if (threadIdx.x == kThreads) prefetch_map(maps.query), prefetch_map(maps.k_cache), prefetch_map(maps.v_cache);
    if (int i = threadIdx.x; i < kBarriers) init_barrier(barriers + 8 * i, i < kStageEmpty ? 1 : kThreads / 32);
    fence_barriers();
    __syncthreads();
  }
  if (bulk && threadIdx.x >= kThreads)
    return produce<Products>(p, plan, maps, tile, split, block_steps, capacity, limits, memory.address);

  wait_for_predecessor();
  const bool told = bulk && p.window == 0;  // so that both sides count the same steps
  if (told) __syncthreads();
  const int length = told ? limits.length : p.lengths[tile.batch];
  limits.fill(p, tile.batch, length, block_steps > 0);
  if (p.window > 0)
    __syncthreads();
  else
    sync_consumers<kThreads>();
  const Context context(p, length, limits, kKeys);
  const Steps steps(plan, context, split, block_steps, kKeys);
  const auto copy = [&](int step, int stage) {
    if (step < steps.all)
      copy_step<Products>(p, plan, tile, steps.in_block(step), steps.row(step, kKeys, capacity), capacity,
                          stages.pointer + stage * Memory::kStageBytes);
    commit_copies();
  };
  if (bulk) {
    wait_for_phase(barriers + 8 * kQueryCame, 0);
  } else {
    copy_query<Products>(p, plan, tile, query.pointer);
#pragma unroll 1
    for (int step = 0; step < plan.stages; ++step) copy(step, step);
  }

  Products products;
  unsigned parity = 0;
#pragma unroll 1
  for (int step = 0, stage = 0; step < steps.all; ++step) {
    if (bulk) {
      wait_for_phase(barriers + 8 * (kKeysCame + stage), parity);
    } else {
      wait_for_copies<Products::kStages - 1>();
      fence_async();
      sync_consumers<kThreads>();
    }
    const auto wait_for_values = [&] {
      if (bulk) wait_for_phase(barriers + 8 * (kValuesCame + stage), parity);
    };
    const bool block = steps.in_block(step);
    const int row = steps.row(step, kKeys, capacity);
    const bool partial = block || !context.complete(row, kKeys);
    const Place keys = stages + stage * Memory::kStageBytes, values = keys + Memory::kTileBytes;
    if (partial) {
      const uint64_t seen = block ? limits.all_bits(p.slots) >> row : context.seen(row, context.lowest);
      const uint64_t unseen = low_bits(min(kKeys, (block ? p.slots : capacity) - row)) & ~seen;
      if (unseen != 0) {
        wait_for_values();
        clear_rows<Products>(values.pointer, unseen);
      }
    }
    const auto seen_by = [&](int r) {
      const int slot = tile.slot_of(plan, r);
      return block ? limits.bits[slot] >> row : context.seen(row, limits.first[slot]);
    };
    products.step(query, keys, values, p.scale * kLog2e, partial, seen_by, wait_for_values);
    if (bulk) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(barriers + 8 * (kStageEmpty + stage));
    } else {
      sync_consumers<kThreads>();
      copy(step + plan.stages, stage);
    }
    if (++stage == plan.stages) stage = 0, parity ^= 1;
  }
  if (!bulk) wait_for_copies<0>();
  sync_consumers<kThreads>();
  products.store(reinterpret_cast<float*>(query.pointer));
  sync_consumers<kThreads>();
  const int64_t unit = (int64_t(tile.batch) * p.num_kv_heads + tile.kv_head) * plan.row_tiles + index;
  store_partial<Products>(p, plan, reinterpret_cast<float*>(query.pointer), tile, split, unit);
}

}  // namespace
}  // namespace pydflash::cuda
