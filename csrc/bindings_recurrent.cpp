// Gated DeltaNet layers.
#include "bindings.h"

namespace pydflash {
namespace {

// Slots of a block, as far as the host may read them.
void check_index(const char* op, const int32_t* index, int64_t count, int64_t slots) {
  if constexpr (PYDFLASH_HOST_MEMORY)
    for (int64_t i = 0; i < count; ++i)
      if (index[i] >= slots)
        refuse(text(op, ": index must hold slots of the block, at most ", slots - 1, ", got ", index[i]));
}

// The checks that blocks and prompts have alike; fills all but the state.
DeltaInputs inputs_of(const char* op, const TensorView& x, const TensorView& a, const TensorView& b,
                      const TensorView& a_log, const TensorView& dt_bias, const TensorView& state,
                      const TensorView& out, int64_t key_heads) {
  DeltaInputs in{};
  state.float32().shape({-1, -1, -1, -1}, "[B, Hv, Dk, Dv]");
  const int64_t batch = state.dim(0), heads = state.dim(1), key_dim = state.dim(2), value_dim = state.dim(3);
  if (key_heads < 1 || heads % key_heads != 0)
    refuse(text(op, ": key heads Hk must divide Hv = ", heads, ", got ", key_heads));
  for (const int64_t dim : {key_dim, value_dim})
    if (dim < 16 || dim > 256 || dim % 16 != 0)
      refuse(text(op, ": Dk and Dv of state must be multiples of 16 up to 256, got ", dim));
  const int64_t channels = 2 * key_heads * key_dim + heads * value_dim;
  x.floating().shape({batch, -1, channels}, "[B, S, 2 Hk Dk + Hv Dv]").row_contiguous();
  const int64_t slots = x.dim(1);
  a.like(x).shape({batch, slots, heads}, "[B, S, Hv]").row_contiguous();
  b.like(x).shape({batch, slots, heads}, "[B, S, Hv]").row_contiguous();
  a_log.float32().shape({heads}, "[Hv]").contiguous();
  dt_bias.float32().shape({heads}, "[Hv]").contiguous();
  out.like(x).shape({batch, slots, heads, value_dim}, "[B, S, Hv, Dv]").contiguous();
  in.batch = int(batch), in.slots = int(slots), in.key_heads = int(key_heads), in.value_heads = int(heads);
  in.key_dim = int(key_dim), in.value_dim = int(value_dim), in.dtype = x.dtype();
  in.x = x.data(), in.a = a.data(), in.b = b.data(), in.out = out.data();
  in.a_log = data_of<const float>(a_log), in.dt_bias = data_of<const float>(dt_bias);
  x.strides_to(in.x_stride, 2), a.strides_to(in.a_stride, 2), b.strides_to(in.b_stride, 2);
  return in;
}

void delta_rule(Capsule x_, Capsule a_, Capsule b_, Capsule a_log_, Capsule dt_bias_, Capsule state_, Capsule kept_k_,
                Capsule kept_u_, Capsule kept_g_, Capsule kept_count_, Capsule visibility_, Capsule block_k_,
                Capsule block_u_, Capsule block_g_, Capsule out_, bool in_order, Allocate allocate, uintptr_t stream, int device) {
  const char* op = "delta_rule";
  TensorView x(op, "x", x_), a(op, "a", a_), b(op, "b", b_), a_log(op, "a_log", a_log_);
  TensorView dt_bias(op, "dt_bias", dt_bias_), state(op, "state", state_), out(op, "out", out_);
  TensorView kept_k(op, "kept_k", kept_k_), kept_u(op, "kept_u", kept_u_), kept_g(op, "kept_g", kept_g_);
  TensorView kept_count(op, "kept_count", kept_count_), visibility(op, "visibility", visibility_);
  TensorView block_k(op, "block_k", block_k_), block_u(op, "block_u", block_u_), block_g(op, "block_g", block_g_);
  DeltaRuleParams p{};
  p.in = inputs_of(op, x, a, b, a_log, dt_bias, state, out, kept_k.dim(2));
  state.dense_behind(1);
  const int64_t batch = p.in.batch, slots = p.in.slots, kept = kept_k.dim(1);
  if (slots > 64) refuse(text(op, ": x must be of at most 64 slots, got ", slots));
  const auto buffer = [&](const TensorView& k, const TensorView& u, const TensorView& g, int64_t entries) {
    k.float32().shape({batch, entries, p.in.key_heads, p.in.key_dim}, "[B, N, Hk, Dk]").dense_behind(1);
    u.float32().shape({batch, entries, p.in.value_heads, p.in.value_dim}, "[B, N, Hv, Dv]").dense_behind(1);
    g.float32().shape({batch, entries, p.in.value_heads}, "[B, N, Hv]").dense_behind(1);
  };
  buffer(kept_k, kept_u, kept_g, kept);
  buffer(block_k, block_u, block_g, slots);
  kept_count.int32().shape({batch}, "[B]").contiguous();
  visibility.int64().shape({visibility.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  check_values(op, "kept_count", data_of<const int32_t>(kept_count), batch, kept);
  p.kept = int(kept), p.in_order = in_order;
  p.state = data_of<float>(state), p.state_stride = state.stride(0);
  p.kept_k = data_of<const float>(kept_k), p.kept_u = data_of<const float>(kept_u);
  p.kept_g = data_of<const float>(kept_g), p.kept_count = data_of<const int32_t>(kept_count);
  p.kept_k_stride = kept_k.stride(0), p.kept_u_stride = kept_u.stride(0), p.kept_g_stride = kept_g.stride(0);
  p.visibility = data_of<const int64_t>(visibility), p.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
  p.block_k = data_of<float>(block_k), p.block_u = data_of<float>(block_u), p.block_g = data_of<float>(block_g);
  p.block_k_stride = block_k.stride(0), p.block_u_stride = block_u.stride(0), p.block_g_stride = block_g.stride(0);
  if (state.empty()) return;
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::delta_rule(p, stream_of(stream, device));
}

void delta_prompt(Capsule x_, Capsule a_, Capsule b_, Capsule a_log_, Capsule dt_bias_, Capsule state_, Capsule out_,
                  int64_t key_heads, Allocate allocate, uintptr_t stream, int device) {
  const char* op = "delta_prompt";
  TensorView x(op, "x", x_), a(op, "a", a_), b(op, "b", b_), a_log(op, "a_log", a_log_);
  TensorView dt_bias(op, "dt_bias", dt_bias_), state(op, "state", state_), out(op, "out", out_);
  DeltaPromptParams p{};
  p.in = inputs_of(op, x, a, b, a_log, dt_bias, state, out, key_heads);
  state.dense_behind(1);
  p.state = data_of<float>(state), p.state_stride = state.stride(0);
  if (state.empty() || out.empty()) return;
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::delta_prompt(p, stream_of(stream, device));
}

void delta_commit(Capsule block_k_, Capsule block_u_, Capsule block_g_, Capsule block_x_, Capsule index_,
                  Capsule kept_k_, Capsule kept_u_, Capsule kept_g_, Capsule kept_count_, Capsule tail_,
                  uintptr_t stream, int device) {
  const char* op = "delta_commit";
  TensorView block_k(op, "block_k", block_k_), block_u(op, "block_u", block_u_), block_g(op, "block_g", block_g_);
  TensorView block_x(op, "block_x", block_x_), index(op, "index", index_), kept_k(op, "kept_k", kept_k_);
  TensorView kept_u(op, "kept_u", kept_u_), kept_g(op, "kept_g", kept_g_), tail(op, "tail", tail_);
  TensorView kept_count(op, "kept_count", kept_count_);
  block_k.float32().shape({-1, -1, -1, -1, -1}, "[layers, B, S, Hk, Dk]").dense_behind(3);
  const int64_t layers = block_k.dim(0), batch = block_k.dim(1), slots = block_k.dim(2);
  block_u.float32().shape({layers, batch, slots, -1, -1}, "[layers, B, S, Hv, Dv]").dense_behind(3);
  block_g.float32().shape({layers, batch, slots, block_u.dim(3)}, "[layers, B, S, Hv]").dense_behind(3);
  block_x.floating().shape({layers, batch, slots, -1}, "[layers, B, S, C]").dense_behind(3);
  index.int32().shape({batch, -1}, "[B, N]").contiguous();
  const int64_t entries = index.dim(1), room = kept_k.dim(2);
  if (room < entries) refuse(text(op, ": kept_k must have room for N = ", entries, " entries, got ", room));
  kept_k.float32().shape({layers, batch, room, block_k.dim(3), block_k.dim(4)}, "[layers, B, N, Hk, Dk]").dense_behind(3);
  kept_u.float32().shape({layers, batch, room, block_u.dim(3), block_u.dim(4)}, "[layers, B, N, Hv, Dv]").dense_behind(3);
  kept_g.float32().shape({layers, batch, room, block_u.dim(3)}, "[layers, B, N, Hv]").dense_behind(3);
  kept_count.int32().shape({batch}, "[B]").contiguous();
  tail.like(block_x).shape({layers, batch, -1, block_x.dim(3)}, "[layers, B, T - 1, C]").dense_behind(3);
  check_index(op, data_of<const int32_t>(index), batch * entries, slots);
  DeltaCommitParams p{};
  p.layers = int(layers), p.batch = int(batch), p.slots = int(slots), p.entries = int(entries);
  p.tail_rows = int(tail.dim(2));
  p.k_size = block_k.dim(3) * block_k.dim(4), p.u_size = block_u.dim(3) * block_u.dim(4), p.g_size = block_u.dim(3);
  const int64_t element = block_x.element_size();
  p.element_size = int(element), p.x_bytes = block_x.dim(3) * element;
  p.block_k = data_of<const float>(block_k), p.block_u = data_of<const float>(block_u);
  p.block_g = data_of<const float>(block_g), p.block_x = block_x.data();
  p.kept_k = data_of<float>(kept_k), p.kept_u = data_of<float>(kept_u), p.kept_g = data_of<float>(kept_g);
  p.kept_count = data_of<int32_t>(kept_count), p.tail = tail.data(), p.index = data_of<const int32_t>(index);
  block_k.strides_to(p.block_k_stride, 3), block_u.strides_to(p.block_u_stride, 3);
  block_g.strides_to(p.block_g_stride, 3), block_x.strides_to(p.block_x_stride, 3);
  kept_k.strides_to(p.kept_k_stride, 3), kept_u.strides_to(p.kept_u_stride, 3);
  kept_g.strides_to(p.kept_g_stride, 3), tail.strides_to(p.tail_stride, 3);
  for (int i = 0; i < 3; ++i) p.block_x_stride[i] *= element, p.tail_stride[i] *= element;
  if (layers == 0 || batch == 0) return;
  py::gil_scoped_release nogil;
  backend::delta_commit(p, stream_of(stream, device));
}

void short_conv(Capsule x_, Capsule weight_, MaybeCapsule bias_, Capsule tail_, MaybeCapsule visibility_,
                MaybeCapsule block_x_, Capsule out_, uintptr_t stream, int device) {
  const char* op = "short_conv";
  TensorView x(op, "x", x_), weight(op, "weight", weight_), tail(op, "tail", tail_), out(op, "out", out_);
  x.floating().shape({-1, -1, -1}, "[B, S, C]").row_contiguous();
  const int64_t batch = x.dim(0), slots = x.dim(1), channels = x.dim(2);
  weight.like(x).shape({-1, channels}, "[T, C]").contiguous();
  const int64_t taps = weight.dim(0);
  if (taps < 2 || taps > 8) refuse(text(op, ": taps T of weight must be 2 to 8, got ", taps));
  tail.like(x).shape({batch, taps - 1, channels}, "[B, T - 1, C]").row_contiguous();
  out.like(x).shape({batch, slots, channels}, "[B, S, C]").contiguous();
  ShortConvParams p{};
  p.bias = maybe_weight(op, "bias", bias_, x, {channels}, "[C]");
  if (visibility_) {
    if (slots > 64) refuse(text(op, ": x must be of at most 64 slots where there is a visibility, got ", slots));
    TensorView visibility(op, "visibility", *visibility_);
    visibility.int64().shape({visibility.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
    p.visibility = data_of<const int64_t>(visibility), p.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
  }
  if (block_x_) {
    TensorView block_x(op, "block_x", *block_x_);
    block_x.like(x).shape({batch, slots, channels}, "[B, S, C]").row_contiguous();
    p.block_x = block_x.data();
    block_x.strides_to(p.block_x_stride, 2);
  }
  if (out.empty()) return;
  p.batch = int(batch), p.slots = int(slots), p.channels = int(channels), p.taps = int(taps), p.dtype = x.dtype();
  p.x = x.data(), p.weight = weight.data(), p.tail = tail.data(), p.out = out.data();
  x.strides_to(p.x_stride, 2), tail.strides_to(p.tail_stride, 2);
  py::gil_scoped_release nogil;
  backend::short_conv(p, stream_of(stream, device));
}

void gated_rms_norm(Capsule x_, Capsule gate_, Capsule weight_, double eps, Capsule out_, uintptr_t stream, int device) {
  const char* op = "gated_rms_norm";
  TensorView x(op, "x", x_), gate(op, "gate", gate_), weight(op, "weight", weight_), out(op, "out", out_);
  x.floating().shape({-1, -1, -1}, "[M, H, D]").contiguous();
  const int64_t rows = x.dim(0), heads = x.dim(1), size = x.dim(2);
  gate.like(x).shape({rows, heads * size}, "[M, H * D]").row_contiguous();
  weight.like(x).shape({size}, "[D]").contiguous();
  out.like(x).shape({rows, heads, size}, "[M, H, D]").contiguous();
  if (out.empty()) return;
  GatedRmsNormParams p{};
  p.rows = int(rows), p.heads = int(heads), p.size = int(size), p.dtype = x.dtype(), p.eps = float(eps);
  p.x = x.data(), p.gate = gate.data(), p.weight = weight.data(), p.out = out.data(), p.gate_stride = gate.stride(0);
  py::gil_scoped_release nogil;
  backend::gated_rms_norm(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(delta_rule)
PYDFLASH_BIND(delta_prompt)
PYDFLASH_BIND(delta_commit)
PYDFLASH_BIND(short_conv)
PYDFLASH_BIND(gated_rms_norm)

}  // namespace pydflash
