// Chooses tiles and splits from the shapes of a call alone, and launches.
#include "sycl/kernels/block_attention.hpp"

#include <algorithm>

#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {
namespace {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kMaxSplits = 32;         // of a context
constexpr int kSplitKeys = 64;         // cache rows of a split, at least
constexpr int kWorkGroups = 256;       // wanted: eight on each of 32 cores, so that some load while some compute
constexpr int kLeastSubGroups = 4;     // to load with, where fewer have rows
constexpr int kLocalBytes = 64 << 10;  // what a work-group may have on every Intel GPU

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct AttentionPlan {
  int tile_rows, row_tiles, sub_groups, splits;
};

template <int kDim>
constexpr int most_sub_groups() {
  return kDim > 128 ? 4 : 8;
}

template <int kDim>
constexpr int local_bytes() {
  using Rows = AttentionRows<kDim>;
  return most_sub_groups<kDim>() * Rows::kRows * kDim * int(sizeof(float)) +
         kStepKeys * (Rows::kKeyStride + kDim / 4) * int(sizeof(Four)) + 64 * 12;
}

// Calls run(Tag<T, kDim>{}) for the kernel that fits a call.
template <class T, int kDim>
struct Tag {
  using Type = T;
  static constexpr int dim = kDim;
};
template <class Run>
void with_kernel(const BlockAttentionParams& p, Run run) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.head_dim <= 64) return run(Tag<T, 64>{});
    if (p.head_dim <= 128) return run(Tag<T, 128>{});
    return run(Tag<T, 256>{});
  });
}

template <int kDim>
AttentionPlan plan_for(const BlockAttentionParams& p) {
  static_assert(local_bytes<kDim>() <= kLocalBytes, "a tile fits in local memory");
  constexpr int kRows = AttentionRows<kDim>::kRows;
  const int rows = p.num_heads / p.num_kv_heads * p.slots;
  const int row_tiles = int(ceil_div(rows, most_sub_groups<kDim>() * kRows));
  const int sub_groups = int(ceil_div(ceil_div(rows, row_tiles), kRows));
  const int64_t units = int64_t(p.batch) * p.num_kv_heads * row_tiles;
  const int64_t splits = std::min({kWorkGroups / units, ceil_div(p.capacity, kSplitKeys), int64_t(kMaxSplits)});
  return {sub_groups * kRows, row_tiles, std::max(sub_groups, kLeastSubGroups), int(std::max(splits, int64_t(1)))};
}

bool on_16_bytes(const void* data, const int64_t* stride, int size) {
  const auto fits = [&](int64_t x) { return x * size % 16 == 0; };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && fits(stride[0]) && fits(stride[1]) && fits(stride[2]);
}

Strides3 strides_of(const int64_t* stride) { return {stride[0], stride[1], stride[2]}; }

AttentionShape shape_of(const BlockAttentionParams& p, const AttentionPlan& plan, int size) {
  AttentionShape shape{};
  shape.slots = p.slots, shape.group = p.num_heads / p.num_kv_heads, shape.kv_heads = p.num_kv_heads;
  shape.head_dim = p.head_dim, shape.window = p.window;
  shape.capacity = int32_t(std::min(p.capacity, int64_t(INT32_MAX - 256)));
  shape.tile_rows = plan.tile_rows, shape.row_tiles = plan.row_tiles, shape.splits = plan.splits;
  shape.aligned = on_16_bytes(p.q, p.q_stride, size) && on_16_bytes(p.k_cache, p.k_cache_stride, size) &&
                  on_16_bytes(p.v_cache, p.v_cache_stride, size) && on_16_bytes(p.k_block, p.k_block_stride, size) &&
                  on_16_bytes(p.v_block, p.v_block_stride, size) && on_16_bytes(p.out, p.out_stride, size);
  shape.factor = p.scale * kLog2e;
  shape.visibility_stride = p.visibility_stride, shape.depths_stride = p.depths_stride;
  shape.q = strides_of(p.q_stride), shape.k_cache = strides_of(p.k_cache_stride);
  shape.v_cache = strides_of(p.v_cache_stride), shape.k_block = strides_of(p.k_block_stride);
  shape.v_block = strides_of(p.v_block_stride), shape.out = strides_of(p.out_stride);
  return shape;
}

// Rows of all splits, in scratch: sums of head_dim columns and two numbers more.
int64_t partial_rows(const BlockAttentionParams& p, const AttentionPlan& plan) {
  return plan.splits > 1 ? int64_t(p.batch) * p.num_heads * p.slots * plan.splits : 0;
}

template <class T, int kDim>
void launch_plan(const BlockAttentionParams& p, const AttentionPlan& plan, Stream stream) {
  using Rows = AttentionRows<kDim>;
  const char* name = "block_attention";
  if (!device_info(stream).sub_groups_of_16)
    throw std::runtime_error("block_attention: the SYCL device has no sub-groups of 16");
  const AttentionShape shape = shape_of(p, plan, sizeof(T));
  const auto typed = [](const void* data) { return static_cast<const T*>(data); };
  float* sums = static_cast<float*>(p.scratch);
  float* stats = sums + partial_rows(p, plan) * p.head_dim;
  const int64_t groups = int64_t(p.batch) * p.num_kv_heads * plan.row_tiles * plan.splits;
  launch<BlockAttention<T, kDim>>(name, stream, groups, 16 * plan.sub_groups, shape, typed(p.q), typed(p.k_cache),
                                  typed(p.v_cache), typed(p.k_block), typed(p.v_block), static_cast<T*>(p.out),
                                  p.lengths, p.visibility, p.depths, sums, stats, Local<float>{plan.tile_rows * kDim},
                                  Local<Four>{kStepKeys * Rows::kKeyStride}, Local<Four>{kStepKeys * kDim / 4},
                                  Local<uint64_t>{p.slots}, Local<int32_t>{p.slots});
  if (plan.splits > 1) {
    const int64_t count = int64_t(p.batch) * p.num_heads * p.slots * (p.head_dim / 4);
    launch<MergeAttention<T>>(name, stream, ceil_div(count, 64), 64, shape, sums, stats, static_cast<T*>(p.out),
                              count);
  }
}

}  // namespace

void block_attention(const BlockAttentionParams& p, Stream stream) {
  with_kernel(p, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    launch_plan<T, decltype(tag)::dim>(p, plan_for<decltype(tag)::dim>(p), stream);
  });
}

int64_t scratch_bytes(const BlockAttentionParams& p) {
  int64_t bytes = 0;
  with_kernel(p, [&](auto tag) {
    const AttentionPlan plan = plan_for<decltype(tag)::dim>(p);
    bytes = partial_rows(p, plan) * (p.head_dim + 2) * int64_t(sizeof(float));
  });
  return bytes;
}

}  // namespace pydflash::sycl_backend
