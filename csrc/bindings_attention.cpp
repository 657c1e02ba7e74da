// Attention over a cache and a block.
#include "bindings.h"

namespace pydflash {
namespace {

void block_attention(Capsule q_, Capsule k_cache_, Capsule v_cache_, Capsule k_block_, Capsule v_block_,
                     Capsule lengths_, Capsule visibility_, Capsule depths_, int64_t window, double scale,
                     Capsule out_, uintptr_t stream, int device, const Allocate& allocate) {
  const char* op = "block_attention";
  TensorView q(op, "q", q_), kc(op, "k_cache", k_cache_), vc(op, "v_cache", v_cache_), kb(op, "k_block", k_block_),
      vb(op, "v_block", v_block_), lengths(op, "lengths", lengths_), visibility(op, "visibility", visibility_),
      depths(op, "depths", depths_), out(op, "out", out_);
  q.floating().shape({-1, -1, -1, -1}, "[B, Hq, S, D]").row_contiguous();
  const int64_t batch = q.dim(0), heads = q.dim(1), slots = q.dim(2), dim = q.dim(3);
  kc.like(q).shape({batch, -1, -1, dim}, "[B, Hkv, L, D]").row_contiguous();
  const int64_t kv_heads = kc.dim(1), capacity = kc.dim(2);
  vc.like(q).shape({batch, kv_heads, capacity, dim}, "[B, Hkv, L, D]").row_contiguous();
  kb.like(q).shape({batch, kv_heads, slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  vb.like(q).shape({batch, kv_heads, slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  out.like(q).shape({batch, heads, slots, dim}, "[B, Hq, S, D]").row_contiguous();
  lengths.int32().shape({batch}, "[B]").contiguous();
  visibility.int64().shape({visibility.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  depths.int32().shape({depths.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  if (slots < 1 || slots > 64) refuse(text("block_attention: slots S must be 1 to 64, got ", slots));
  if (dim < 8 || dim > 256 || dim % 8 != 0)
    refuse(text("block_attention: head_dim D must be a multiple of 8 from 8 to 256, got ", dim));
  if (kv_heads < 1 || heads % kv_heads != 0)
    refuse(text("block_attention: Hq must be a multiple of Hkv = ", kv_heads, ", got ", heads));
  if (window < 0 || window > INT32_MAX)
    refuse(text("block_attention: window must be >= 0 (0 = none) and below 2^31, got ", window));
  if (out.empty()) return;
  check_lengths(op, data_of<int32_t>(lengths), batch, INT32_MAX - 1024);  // kernels look a tile ahead
  BlockAttentionParams p{};
  p.batch = int(batch), p.num_heads = int(heads), p.num_kv_heads = int(kv_heads), p.slots = int(slots);
  p.head_dim = int(dim), p.window = int(window), p.capacity = capacity, p.scale = float(scale);
  p.dtype = q.dtype();
  p.q = q.data(), p.k_cache = kc.data(), p.v_cache = vc.data(), p.k_block = kb.data(), p.v_block = vb.data();
  p.out = out.data();
  q.strides_to(p.q_stride, 3), kc.strides_to(p.k_cache_stride, 3), vc.strides_to(p.v_cache_stride, 3);
  kb.strides_to(p.k_block_stride, 3), vb.strides_to(p.v_block_stride, 3), out.strides_to(p.out_stride, 3);
  p.lengths = data_of<int32_t>(lengths);
  p.visibility = data_of<int64_t>(visibility), p.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
  p.depths = data_of<int32_t>(depths), p.depths_stride = depths.dim(0) == 1 ? 0 : slots;
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::block_attention(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(block_attention)

}  // namespace pydflash
