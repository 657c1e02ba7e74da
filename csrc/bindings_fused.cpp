// The fused ops; their callers are pydflash's own, so checks guard against wrong sizes only.
#include "bindings.h"

namespace pydflash {
namespace {

// cos and sin; returns the number of positions.
int64_t check_tables(const char* op, const TensorView& cos, const TensorView& sin, int64_t rotary_dim,
                     int64_t head_dim) {
  if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0)
    refuse(text(op, ": rotary_dim must be even and at most head_dim = ", head_dim, ", got ", rotary_dim));
  cos.float32().shape({-1, rotary_dim / 2}, "[positions, rotary_dim / 2]").contiguous();
  sin.float32().shape({cos.dim(0), rotary_dim / 2}, "[positions, rotary_dim / 2]").contiguous();
  if (rotary_dim > 0 && cos.dim(0) == 0) cos.fail("of at least one position", "0");
  return cos.dim(0);
}

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

void context_append(Capsule kv_, MaybeCapsule k_weights_, double eps, Capsule cos_, Capsule sin_, Capsule k_cache_,
                    Capsule v_cache_, Capsule lengths_, Capsule counts_, int64_t rotary_dim, bool interleaved,
                    double weight_offset, bool round_first, uintptr_t stream, int device) {
  const char* op = "context_append";
  TensorView kv(op, "kv", kv_), cos(op, "cos", cos_), sin(op, "sin", sin_), kc(op, "k_cache", k_cache_),
      vc(op, "v_cache", v_cache_), lengths(op, "lengths", lengths_), counts(op, "counts", counts_);
  kc.floating().shape({-1, -1, -1, -1, -1}, "[Ly, B, Hkv, L, D]").row_contiguous();
  const int64_t layers = kc.dim(0), batch = kc.dim(1), heads = kc.dim(2), capacity = kc.dim(3), dim = kc.dim(4);
  vc.like(kc).shape({layers, batch, heads, capacity, dim}, "[Ly, B, Hkv, L, D]").row_contiguous();
  kv.like(kc).shape({batch, -1, layers * 2 * heads * dim}, "[B, C, Ly * 2 * Hkv * D]").row_contiguous();
  lengths.int32().shape({batch}, "[B]").contiguous();
  counts.int32().shape({batch}, "[B]").contiguous();
  if (dim % 8 != 0 || dim > 256) kc.fail("of a head_dim that is a multiple of 8 up to 256", text(dim));
  ContextAppendParams p{};
  p.positions = check_tables(op, cos, sin, rotary_dim, dim);
  p.k_weights = maybe_weight(op, "k_weights", k_weights_, kc, {layers, dim}, "[Ly, D]");
  if (kv.empty() || capacity == 0) return;
  p.layers = int(layers), p.batch = int(batch), p.rows = int(kv.dim(1)), p.num_kv_heads = int(heads);
  p.head_dim = int(dim), p.rotary_dim = int(rotary_dim), p.interleaved = interleaved, p.round_first = round_first;
  p.dtype = kc.dtype(), p.kv = kv.data(), kv.strides_to(p.kv_stride, 2);
  p.eps = float(eps), p.weight_offset = float(weight_offset);
  p.cos = data_of<float>(cos), p.sin = data_of<float>(sin);
  p.k_cache = kc.data(), p.v_cache = vc.data(), p.capacity = capacity;
  kc.strides_to(p.k_cache_stride, 4), vc.strides_to(p.v_cache_stride, 4);
  p.lengths = data_of<int32_t>(lengths), p.counts = data_of<int32_t>(counts);
  py::gil_scoped_release nogil;
  backend::context_append(p, stream_of(stream, device));
}

void round_commit(Capsule tokens_, Capsule index_, Capsule num_accepted_, Capsule bonus_, Capsule active_,
                  MaybeCapsule features_in_, MaybeCapsule features_out_, Capsule anchors_, Capsule lengths_,
                  Capsule starts_, Capsule counts_, Capsule record_, uintptr_t stream, int device) {
  const char* op = "round_commit";
  TensorView tokens(op, "tokens", tokens_), index(op, "index", index_), num_accepted(op, "num_accepted", num_accepted_),
      bonus(op, "bonus", bonus_), active(op, "active", active_), anchors(op, "anchors", anchors_),
      lengths(op, "lengths", lengths_), starts(op, "starts", starts_), counts(op, "counts", counts_),
      record(op, "record", record_);
  tokens.int64().shape({-1, -1}, "[B, S]").contiguous();
  const int64_t batch = tokens.dim(0), slots = tokens.dim(1);
  index.int32().shape({batch, slots}, "[B, S]").contiguous();
  for (const TensorView* view : {&num_accepted, &active, &lengths, &starts, &counts})
    view->int32().shape({batch}, "[B]").contiguous();
  for (const TensorView* view : {&bonus, &anchors}) view->int64().shape({batch}, "[B]").contiguous();
  record.int64().shape({batch, slots + 1}, "[B, S + 1]").contiguous();
  RoundCommitParams p{};
  if (features_in_) {
    TensorView in(op, "features", *features_in_), out(op, "features_out", features_out_.value());
    in.floating().shape({batch, slots, -1}, "[B, S, F]").row_contiguous();
    out.like(in).shape({batch, slots, in.dim(2)}, "[B, S, F]").contiguous();
    p.features = int(in.dim(2)), p.element_size = in.element_size();
    p.features_in = in.data(), in.strides_to(p.features_stride, 2), p.features_out = out.data();
  }
  if (tokens.empty()) return;
  p.batch = int(batch), p.slots = int(slots);
  p.tokens = data_of<int64_t>(tokens), p.index = data_of<int32_t>(index);
  p.num_accepted = data_of<int32_t>(num_accepted), p.bonus = data_of<int64_t>(bonus);
  p.active = data_of<int32_t>(active), p.anchors = data_of<int64_t>(anchors);
  p.lengths = data_of<int32_t>(lengths), p.starts = data_of<int32_t>(starts);
  p.counts = data_of<int32_t>(counts), p.record = data_of<int64_t>(record);
  py::gil_scoped_release nogil;
  backend::round_commit(p, stream_of(stream, device));
}

}  // namespace

void define_fused(py::module_& m) {
  m.def("add_rms_norm", &add_rms_norm);
  m.def("swiglu", &swiglu);
  m.def("head_norm_rope", &head_norm_rope);
  m.def("context_append", &context_append);
  m.def("round_commit", &round_commit);
}

}  // namespace pydflash
