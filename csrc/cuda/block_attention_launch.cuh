// Chooses tiles and splits from the shapes of a call, and launches.
#pragma once

#include <algorithm>

#include "cuda/block_attention_float.cuh"
#include "cuda/block_attention_kernel.cuh"
#include "cuda/block_attention_tensor.cuh"
#include "cuda/tensor_map.cuh"

namespace pydflash::cuda {
namespace {

template <class Products>
struct Tag {
  using Type = Products;
};

// Calls run(Tag<Products>{}) for the products that fit a call.
template <class T, class Run>
auto with_products(const BlockAttentionParams& p, Run run) {
  const int dim = p.head_dim, rows = p.num_heads / p.num_kv_heads * p.slots;
  if constexpr (std::is_same_v<T, float>) {
    if (dim <= 64) return run(Tag<FloatProducts<64>>{});
    if (dim <= 128) return run(Tag<FloatProducts<128>>{});
    return run(Tag<FloatProducts<256>>{});
  } else {
    if (dim > 128) return run(Tag<TensorProducts<T, 256, 4, 1>>{});
    if (rows <= 16)
      return dim <= 64 ? run(Tag<TensorProducts<T, 64, 1, 4>>{}) : run(Tag<TensorProducts<T, 128, 1, 4>>{});
    if (rows <= 64)
      return dim <= 64 ? run(Tag<TensorProducts<T, 64, 4, 1>>{}) : run(Tag<TensorProducts<T, 128, 4, 1>>{});
    return dim <= 64 ? run(Tag<TensorProducts<T, 64, 8, 1>>{}) : run(Tag<TensorProducts<T, 128, 8, 1>>{});
  }
}

inline bool on_16_bytes(const void* data, const int64_t* stride, int size) {
  const auto fits = [&](int64_t x) { return x * size % 16 == 0; };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && fits(stride[0]) && fits(stride[1]) && fits(stride[2]);
}

template <class Products>
AttentionPlan plan_for(const BlockAttentionParams& p, int device) {
  using Memory = Layout<Products>;
  const DeviceInfo& info = device_info(device);
  AttentionPlan plan{};
  plan.group = p.num_heads / p.num_kv_heads;
  plan.rows = Products::kRows, plan.columns = Products::kDim;
  plan.tile_slots = std::min(p.slots, plan.rows), plan.per_slot = 1.0f / float(plan.tile_slots);
  plan.slot_tiles = ceil_div(p.slots, plan.tile_slots);
  plan.tile_heads = plan.slot_tiles > 1 ? 1 : std::min(plan.group, plan.rows / plan.tile_slots);
  plan.row_tiles = ceil_div(plan.group, plan.tile_heads) * plan.slot_tiles;
  // As many blocks of threads as run at once, but no more splits than steps.
  const int64_t units = int64_t(p.batch) * p.num_kv_heads * plan.row_tiles;
  const int64_t together = int64_t(info.multiprocessors) * Products::kMinBlocks;
  while (plan.split_bits < 4 && (2 * units << plan.split_bits) <= together &&
         (Products::kKeys << plan.split_bits) < p.capacity + p.slots)
    ++plan.split_bits;
  plan.splits = 1 << plan.split_bits;
  const int memory = info.shared_bytes / Products::kMinBlocks;
  plan.stages = Products::kStages;
  while (plan.stages < kMaxStages && Memory::bytes(plan.stages + 1) <= memory) ++plan.stages;
  const int size = sizeof(typename Products::T);
  plan.aligned = on_16_bytes(p.q, p.q_stride, size) && on_16_bytes(p.k_cache, p.k_cache_stride, size) &&
                 on_16_bytes(p.v_cache, p.v_cache_stride, size) && on_16_bytes(p.k_block, p.k_block_stride, size) &&
                 on_16_bytes(p.v_block, p.v_block_stride, size) && on_16_bytes(p.out, p.out_stride, size);
  plan.bulk = info.capability >= 90 && plan.aligned;
  if (info.capability < 90) plan.stages = Products::kStages;
  return plan;
}

// A tensor [batch, head, row, element] as boxes of rows, in slabs of 128 swizzled bytes of a row.
inline bool make_map(CUtensorMap* map, DType dtype, const void* data, const int64_t* stride, int dim, int64_t rows,
                     int heads, int batch, int box_rows, int box_heads) {
  const int64_t sizes[4] = {dim, rows, heads, batch}, strides[3] = {stride[2], stride[1], stride[0]};
  const int box[4] = {128 / (dtype == DType::f32 ? 4 : 2), box_rows, box_heads, 1};
  return make_tensor_map(map, dtype, data, sizes, strides, box);
}

template <class Products>
bool make_maps(AttentionMaps* maps, const BlockAttentionParams& p, const AttentionPlan& plan) {
  const auto keys = [&](CUtensorMap* map, const void* data, const int64_t* stride, int64_t rows) {
    return make_map(map, p.dtype, data, stride, p.head_dim, rows, p.num_kv_heads, p.batch, Products::kKeys, 1);
  };
  const bool cache = p.capacity == 0 || (keys(&maps->k_cache, p.k_cache, p.k_cache_stride, p.capacity) &&
                                         keys(&maps->v_cache, p.v_cache, p.v_cache_stride, p.capacity));
  return cache && keys(&maps->k_block, p.k_block, p.k_block_stride, p.slots) &&
         keys(&maps->v_block, p.v_block, p.v_block_stride, p.slots) &&
         make_map(&maps->query, p.dtype, p.q, p.q_stride, p.head_dim, p.slots, p.num_heads, p.batch, plan.tile_slots,
                  plan.tile_heads);
}

template <class Products>
void launch_plan(const BlockAttentionParams& p, AttentionPlan plan, Stream stream) {
  AttentionMaps maps{};
  plan.bulk = plan.bulk && make_maps<Products>(&maps, p, plan);
  const int threads = Products::kThreads + (plan.bulk ? 32 : 0), bytes = Layout<Products>::bytes(plan.stages);
  launch("block_attention", attend<Products>, dim3(plan.row_tiles * plan.splits, p.num_kv_heads, p.batch), threads,
         bytes, stream, p, plan, maps);
  if (plan.splits > 1) {
    const int passes = plan.rows * plan.columns / 512;
    launch("block_attention", merge_partials<typename Products::T>,
           dim3(plan.row_tiles * passes, p.num_kv_heads, p.batch), 128, 0, stream, p, plan);
  }
}

inline int64_t partial_rows(const BlockAttentionParams& p, const AttentionPlan& plan) {
  return plan.splits > 1 ? int64_t(p.batch) * p.num_kv_heads * plan.row_tiles * plan.splits * plan.rows : 0;
}

}  // namespace

template <class T>
void block_attention_of(const BlockAttentionParams& p, Stream stream) {
  with_products<T>(p, [&](auto tag) {
    using Products = typename decltype(tag)::Type;
    AttentionPlan plan = plan_for<Products>(p, stream.device);
    if (partial_rows(p, plan) > 0 && p.scratch == nullptr) plan.splits = 1, plan.split_bits = 0;
    plan.sums = static_cast<float*>(p.scratch);
    plan.stats = reinterpret_cast<float2*>(plan.sums + partial_rows(p, plan) * plan.columns);
    launch_plan<Products>(p, plan, stream);
  });
}

template <class T>
int64_t block_attention_scratch(const BlockAttentionParams& p, int device) {
  return with_products<T>(p, [&](auto tag) -> int64_t {
    const AttentionPlan plan = plan_for<typename decltype(tag)::Type>(p, device);
    return partial_rows(p, plan) * (plan.columns * int64_t(sizeof(float)) + int64_t(sizeof(float2)));
  });
}

}  // namespace pydflash::cuda
