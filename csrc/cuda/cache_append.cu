#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kThreads = 256;

// Number of entries before the first that is negative; for a whole warp.
__device__ __forceinline__ int valid_entries(const int32_t* index, int entries) {
  int first = entries;
  for (int n = threadIdx.x % 32; n < entries; n += 32)
    if (index[n] < 0) first = min(first, n);
  return __reduce_min_sync(0xffffffffu, first);
}

// A block takes `heads` heads of one layer and sequence, a thread a unit of every at_once-th row, of keys and values.
// p's strides and head_dim count units.
template <class Unit>
__global__ void __launch_bounds__(kThreads) cache_append_kernel(CacheAppendParams p, int heads) {
  const int width = min(p.head_dim, kThreads), at_once = kThreads / width / heads, row = threadIdx.x / width;
  const int head = blockIdx.x * heads + row / at_once, layer = blockIdx.y, b = blockIdx.z;
  const int32_t* index = p.index + int64_t(b) * p.entries;
  const auto head_of = [&](const void* data, const int64_t* stride) {
    return static_cast<const Unit*>(data) + layer * stride[0] + b * stride[1] + head * stride[2];
  };
  const Unit *k_block = head_of(p.k_block, p.k_block_stride), *v_block = head_of(p.v_block, p.v_block_stride);
  Unit* k_cache = const_cast<Unit*>(head_of(p.k_cache, p.k_cache_stride));
  Unit* v_cache = const_cast<Unit*>(head_of(p.v_cache, p.v_cache_stride));
  wait_for_predecessor();
  const int32_t length = p.lengths[b];
  const int count = valid_entries(index, p.entries);
  if (row >= heads * at_once || head >= p.num_kv_heads) return;
  // In a ring only the last `capacity` rows survive; the others are not written at all.
  const int skipped = count > p.capacity ? count - int(p.capacity) : 0;
#pragma unroll 1
  for (int n = skipped + row % at_once; n < count; n += at_once) {
    const int64_t from = index[n], to = ring_row(length, n, p.capacity);
#pragma unroll 1
    for (int unit = threadIdx.x % width; unit < p.head_dim; unit += width) {
      const Unit k = k_block[from * p.k_block_stride[3] + unit], v = v_block[from * p.v_block_stride[3] + unit];
      k_cache[to * p.k_cache_stride[3] + unit] = k;
      v_cache[to * p.v_cache_stride[3] + unit] = v;
    }
  }
}

template <class Unit>
void run(CacheAppendParams p, Stream stream) {
  const int per_unit = int(sizeof(Unit)) / p.element_size;
  p.head_dim /= per_unit;
  for (int64_t* strides : {p.k_cache_stride, p.v_cache_stride, p.k_block_stride, p.v_block_stride})
    for (int i = 0; i < 4; ++i) strides[i] /= per_unit;
  // So many heads to a block that 4 rows of each are moved at once: a launch of fewer blocks starts sooner.
  const int rows = kThreads / (p.head_dim < kThreads ? p.head_dim : kThreads);
  const int at_once = p.entries < 4 ? p.entries : 4;
  int heads = rows / at_once > 1 ? rows / at_once : 1;
  if (heads > p.num_kv_heads) heads = p.num_kv_heads;
  const dim3 grid((p.num_kv_heads + heads - 1) / heads, p.layers, p.batch);
  launch("cache_append", cache_append_kernel<Unit>, grid, kThreads, 0, stream, p, heads);
}

}  // namespace

void cache_append(const CacheAppendParams& p, Stream stream) {
  const auto pieces = [&](const void* data, const int64_t* strides) {
    return in_pieces(data, p.element_size, p.head_dim, strides, 4);
  };
  if (pieces(p.k_cache, p.k_cache_stride) && pieces(p.v_cache, p.v_cache_stride) &&
      pieces(p.k_block, p.k_block_stride) && pieces(p.v_block, p.v_block_stride))
    return run<uint4>(p, stream);
  return p.element_size == 4 ? run<uint32_t>(p, stream) : run<uint16_t>(p, stream);
}

}  // namespace pydflash::cuda
