// Norms, rotations and gates of a layer.
#include "bindings.h"

namespace pydflash {
namespace {

void add_rms_norm(Capsule x_, MaybeCapsule delta_, Capsule weight_, double eps, double weight_offset, bool round_first,
                  Capsule out_, MaybeCapsule sum_, uintptr_t stream, int device) {
  const char* op = "add_rms_norm";
  TensorView x(op, "x", x_), weight(op, "weight", weight_), out(op, "out", out_);
  x.floating().shape({-1, -1}, "[M, H]").row_contiguous();
  const int64_t rows = x.dim(0), size = x.dim(1);
  weight.like(x).shape({size}, "[H]").contiguous();
  out.like(x).shape({rows, size}, "[M, H]").row_contiguous();
  AddRmsNormParams p{};
  if (delta_) {
    TensorView delta(op, "delta", *delta_), sum(op, "sum", sum_.value());
    delta.like(x).shape({rows, size}, "[M, H]").row_contiguous();
    sum.like(x).shape({rows, size}, "[M, H]").contiguous();
    p.delta = delta.data(), p.delta_stride = delta.stride(0), p.sum = sum.data();
  }
  if (out.empty()) return;
  p.rows = int(rows), p.size = int(size), p.dtype = x.dtype();
  p.x = x.data(), p.x_stride = x.stride(0), p.weight = weight.data();
  p.eps = float(eps), p.weight_offset = float(weight_offset), p.round_first = round_first;
  p.out = out.data(), p.out_stride = out.stride(0);
  py::gil_scoped_release nogil;
  backend::add_rms_norm(p, stream_of(stream, device));
}

void swiglu(Capsule x_, Capsule out_, uintptr_t stream, int device) {
  TensorView x("swiglu", "x", x_), out("swiglu", "out", out_);
  x.floating().shape({-1, -1}, "[M, 2 N]").row_contiguous();
  if (x.dim(1) % 2 != 0) x.fail("[M, 2 N]", text("a width of ", x.dim(1)));
  out.like(x).shape({x.dim(0), x.dim(1) / 2}, "[M, N]").row_contiguous();
  if (out.empty()) return;
  if (x.dim(0) > 65535) x.fail("at most 65535 rows", text(x.dim(0)));
  const SwigluParams p{int(x.dim(0)), int(x.dim(1) / 2), x.dtype(), x.data(), out.data(), x.stride(0), out.stride(0)};
  py::gil_scoped_release nogil;
  backend::swiglu(p, stream_of(stream, device));
}

void head_norm_rope(Capsule qkv_, MaybeCapsule q_weight_, MaybeCapsule k_weight_, double eps, Capsule cos_,
                    Capsule sin_, Capsule lengths_, Capsule depths_, Capsule q_, Capsule k_, Capsule v_,
                    int64_t rotary_dim, bool interleaved, double weight_offset, bool round_first, uintptr_t stream,
                    int device) {
  const char* op = "head_norm_rope";
  TensorView qkv(op, "qkv", qkv_), cos(op, "cos", cos_), sin(op, "sin", sin_), lengths(op, "lengths", lengths_),
      depths(op, "depths", depths_), q(op, "q", q_), k(op, "k_block", k_), v(op, "v_block", v_);
  q.floating().shape({-1, -1, -1, -1}, "[B, Hq, S, D]").row_contiguous();
  const int64_t batch = q.dim(0), heads = q.dim(1), slots = q.dim(2), dim = q.dim(3);
  k.like(q).shape({batch, -1, slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  v.like(q).shape({batch, k.dim(1), slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  qkv.like(q).shape({batch, slots, (heads + 2 * k.dim(1)) * dim}, "[B, S, (Hq + 2 Hkv) D]").row_contiguous();
  if (dim % 8 != 0 || dim > 256) q.fail("of a head_dim that is a multiple of 8 up to 256", text(dim));
  lengths.int32().shape({batch}, "[B]").contiguous();
  depths.int32().shape({depths.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  HeadNormRopeParams p{};
  p.positions = check_tables(op, cos, sin, rotary_dim, dim);
  p.q_weight = maybe_weight(op, "q_weight", q_weight_, q, {dim}, "[D]");
  p.k_weight = maybe_weight(op, "k_weight", k_weight_, q, {dim}, "[D]");
  if (q.empty()) return;
  p.batch = int(batch), p.slots = int(slots), p.num_heads = int(heads), p.num_kv_heads = int(k.dim(1));
  p.head_dim = int(dim), p.rotary_dim = int(rotary_dim), p.interleaved = interleaved, p.round_first = round_first;
  p.dtype = q.dtype(), p.qkv = qkv.data(), qkv.strides_to(p.qkv_stride, 2);
  p.eps = float(eps), p.weight_offset = float(weight_offset);
  p.cos = data_of<float>(cos), p.sin = data_of<float>(sin);
  p.lengths = data_of<int32_t>(lengths), p.depths = data_of<int32_t>(depths);
  p.depths_stride = depths.dim(0) == 1 ? 0 : slots;
  p.q = q.data(), p.k = k.data(), p.v = v.data();
  q.strides_to(p.q_stride, 3), k.strides_to(p.k_stride, 3), v.strides_to(p.v_stride, 3);
  py::gil_scoped_release nogil;
  backend::head_norm_rope(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(add_rms_norm)
PYDFLASH_BIND(swiglu)
PYDFLASH_BIND(head_norm_rope)

}  // namespace pydflash
