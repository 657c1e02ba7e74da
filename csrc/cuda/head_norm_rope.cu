#include "cuda/heads.cuh"

namespace pydflash::cuda {
namespace {

// blockIdx is slot, part of the heads, sequence; the groups of a block take heads in turn, in the projection's order.
template <class T, Pairs kPairs>
__global__ void __launch_bounds__(kHeadThreads) head_norm_rope_kernel(HeadNormRopeParams p, Group group) {
  release_successor();
  __shared__ alignas(16) T rows[kPairs == Pairs::anywhere ? kHeadThreads * kLaneChannels : 1];
  constexpr bool kAligned = kPairs != Pairs::anywhere;
  const int lane = threadIdx.x & (group.lanes() - 1), c = lane * kLaneChannels, slot = blockIdx.x, b = blockIdx.z;
  const int heads = p.num_heads + 2 * p.num_kv_heads, step = gridDim.y * group.per_block();
  int head = blockIdx.y * group.per_block() + (threadIdx.x >> group.shift);
  const bool live = c < p.head_dim;
  const T* row = static_cast<const T*>(p.qkv) + b * p.qkv_stride[0] + slot * p.qkv_stride[1] + c;
  const auto fetch = [&](const T* from, bool there) {
    return there && live ? load_head<kAligned>(from) : HeadPiece<T>{};
  };
  wait_for_predecessor();

  const int32_t length = p.lengths[b], depth = p.depths[b * p.depths_stride + slot];
  HeadPiece<T> next = fetch(row + head * p.head_dim, head < heads);
  const HeadPiece<T> q_weight = fetch(static_cast<const T*>(p.q_weight) + c, p.q_weight != nullptr);
  const HeadPiece<T> k_weight = fetch(static_cast<const T*>(p.k_weight) + c, p.k_weight != nullptr);
  const Rotation<T, kPairs> rotate(p, length, depth, c, rows + (kAligned ? 0 : (threadIdx.x - lane) * kLaneChannels));

  // Every lane of a warp makes as many turns as the others, for the exchange between lanes.
#pragma unroll 1
  for (int begin = blockIdx.y * group.per_block(); begin < heads; begin += step, head += step) {
    const bool is_q = head < p.num_heads, is_k = !is_q && head < p.num_heads + p.num_kv_heads;
    HeadPiece<T> x = next, weight = k_weight;
    next = fetch(row + (head + step) * p.head_dim, head + step < heads);
    if (is_q) weight = q_weight;
    const HeadPiece<T> normed = head_norm(p, group, x, weight);
    if (is_q ? p.q_weight != nullptr : is_k && p.k_weight != nullptr) x = normed;
    const HeadPiece<T> rotated = rotate(x);
    if (is_q || is_k) x = rotated;
    if (!live || head >= heads) continue;
    const int first = is_q ? 0 : is_k ? p.num_heads : p.num_heads + p.num_kv_heads;
    const int64_t* stride = is_q ? p.q_stride : is_k ? p.k_stride : p.v_stride;
    T* out = static_cast<T*>(is_q ? p.q : is_k ? p.k : p.v);
    store_head<kAligned>(out + b * stride[0] + (head - first) * stride[1] + slot * stride[2] + c, x);
  }
}

}  // namespace

void head_norm_rope(const HeadNormRopeParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    const auto fits = [&](const void* data, const int64_t* strides, int count) {
      return in_pieces(data, int(sizeof(T)), p.head_dim, strides, count);
    };
    const bool aligned = fits(p.qkv, p.qkv_stride, 2) && fits(p.q, p.q_stride, 3) && fits(p.k, p.k_stride, 3) &&
                         fits(p.v, p.v_stride, 3) && fits(p.q_weight, nullptr, 0) && fits(p.k_weight, nullptr, 0);
    const Group group(p.head_dim);
    const int heads = p.num_heads + 2 * p.num_kv_heads;
    const dim3 grid(p.slots, blocks_for(int64_t(p.batch) * p.slots, heads, group, stream.device), p.batch);
    by_pairs(pairs_of(p, aligned), [&](auto pairs) {
      launch("head_norm_rope", head_norm_rope_kernel<T, pairs()>, grid, kHeadThreads, 0, stream, p, group);
    });
  });
}

}  // namespace pydflash::cuda
