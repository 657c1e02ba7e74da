#include "cuda/heads.cuh"

namespace pydflash::cuda {
namespace {

// blockIdx is row of the context, part of the heads, sequence; the groups of a block take keys and values in turn:
// layer, k or v, head.
template <class T, Pairs kPairs>
__global__ void __launch_bounds__(kHeadThreads) context_append_kernel(ContextAppendParams p, Group group) {
  __shared__ alignas(16) T rows[kPairs == Pairs::anywhere ? kHeadThreads * kLaneChannels : 1];
  constexpr bool kAligned = kPairs != Pairs::anywhere;
  const int lane = threadIdx.x & (group.lanes() - 1), c = lane * kLaneChannels, n = blockIdx.x, b = blockIdx.z;
  const int of_layer = 2 * p.num_kv_heads, heads = p.layers * of_layer, step = gridDim.y * group.per_block();
  int head = blockIdx.y * group.per_block() + (threadIdx.x >> group.shift);
  const bool live = c < p.head_dim, norms = p.k_weights != nullptr;
  const T* row = static_cast<const T*>(p.kv) + b * p.kv_stride[0] + n * p.kv_stride[1] + c;
  const T* weights = static_cast<const T*>(p.k_weights) + c;
  const auto fetch = [&](const T* from, bool there) {
    return there && live ? load_head<kAligned>(from) : HeadPiece<T>{};
  };
  wait_for_predecessor();

  const int32_t count = p.counts[b], length = p.lengths[b];
  HeadPiece<T> next = fetch(row + head * p.head_dim, head < heads);
  HeadPiece<T> next_weight = fetch(weights + head / of_layer * p.head_dim, norms && head < heads);
  if (n >= count || count - n > p.capacity) return;
  const int64_t to = ring_row(length, n, p.capacity);
  const Rotation<T, kPairs> rotate(p, length, n, c, rows + (kAligned ? 0 : (threadIdx.x - lane) * kLaneChannels));

  // Every lane of a warp makes as many turns as the others, for the exchange between lanes.
#pragma unroll 1
  for (int begin = blockIdx.y * group.per_block(); begin < heads; begin += step, head += step) {
    const int layer = head / of_layer, place = head - layer * of_layer, after = head + step;
    const bool is_k = place < p.num_kv_heads;
    HeadPiece<T> x = next;
    const HeadPiece<T> weight = next_weight;
    next = fetch(row + after * p.head_dim, after < heads);
    next_weight = fetch(weights + after / of_layer * p.head_dim, norms && after < heads);
    const HeadPiece<T> normed = head_norm(p, group, x, weight);
    if (norms && is_k) x = normed;
    const HeadPiece<T> rotated = rotate(x);
    if (is_k) x = rotated;
    if (!live || head >= heads) continue;
    const int64_t* stride = is_k ? p.k_cache_stride : p.v_cache_stride;
    T* cache = static_cast<T*>(is_k ? p.k_cache : p.v_cache) + layer * stride[0] + b * stride[1];
    store_head<kAligned>(cache + (is_k ? place : place - p.num_kv_heads) * stride[2] + to * stride[3] + c, x);
  }
}

}  // namespace

void context_append(const ContextAppendParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto fits = [&](const void* data, const int64_t* strides, int count) {
      return in_pieces(data, int(sizeof(T)), p.head_dim, strides, count);
    };
    const bool aligned = fits(p.kv, p.kv_stride, 2) && fits(p.k_cache, p.k_cache_stride, 4) &&
                         fits(p.v_cache, p.v_cache_stride, 4) && fits(p.k_weights, nullptr, 0);
    const Group group(p.head_dim);
    const int heads = 2 * p.layers * p.num_kv_heads;
    const dim3 grid(p.rows, blocks_for(int64_t(p.batch) * p.rows, heads, group, stream.device), p.batch);
    by_pairs(pairs_of(p, aligned), [&](auto pairs) {
      launch("context_append", context_append_kernel<T, pairs()>, grid, kHeadThreads, 0, stream, p, group);
    });
  });
}

}  // namespace pydflash::cuda
