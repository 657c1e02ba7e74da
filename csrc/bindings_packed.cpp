// What CPUs have beside the ops of all backends: packed_linear, and a decoder as one call.
#include "bindings.h"
#include "cpu/decoder.h"

namespace pydflash {
namespace {

// Weight, scales, bias, in_features, out_features and the format's name.
using LinearParts = std::tuple<Capsule, MaybeCapsule, MaybeCapsule, int64_t, int64_t, std::string>;
// Weight, eps, weight_offset, round_first; whether it is a LayerNorm, and its bias.
using NormParts = std::tuple<Capsule, double, double, bool, bool, MaybeCapsule>;
// Bases before and after, and the projection of the deltas.
using ConvParts = std::tuple<Capsule, Capsule, LinearParts>;
// What the records of pydflash/decoder/records.py give as `arguments`:
// Norms before and after, scale, convolutions.
using AroundParts = std::tuple<std::optional<NormParts>, std::optional<NormParts>, double, std::optional<ConvParts>>;
// qkv, output, norms of q and k; heads, KV heads, head_dim, rotary_dim; interleaved, scale, window, causal, table.
using AttentionParts = std::tuple<LinearParts, LinearParts, std::optional<NormParts>, std::optional<NormParts>,
                                  std::array<int, 4>, bool, double, int, bool, int>;
using MLPParts = std::tuple<LinearParts, LinearParts, std::string>;  // gate_up, down, activation
using LayerParts = std::tuple<AttentionParts, MLPParts, AroundParts, AroundParts, bool>;
using TableParts = std::tuple<Capsule, Capsule>;  // cos, sin

WeightFormat format_of(const char* op, const std::string& name) {
  if (name == "float32") return WeightFormat::f32;
  if (name == "bfloat16") return WeightFormat::bf16;
  if (name == "int8") return WeightFormat::int8;
  refuse(text(op, ": format must be float32, bfloat16 or int8, got ", name));
}

cpu::DecoderLinear check_linear(const char* op, const LinearParts& parts, const TensorView& like) {
  const auto& [weight_, scales_, bias_, in_features, out_features, name] = parts;
  const WeightFormat format = format_of(op, name);
  const bool whole = format == WeightFormat::int8;
  TensorView weight(op, "weight", weight_);
  if (!whole && (format == WeightFormat::f32 ? DType::f32 : DType::bf16) != like.dtype())
    like.fail(text(name, ", as the weight's format"), "another dtype");
  if (whole != scales_.has_value())
    refuse(text(op, ": scales must be ", whole ? "given" : "None", " with ", name, ", got ", whole ? "None" : "some"));
  whole ? weight.is("int8, as its format", 0, 8) : weight.like(like);
  const int inputs = whole ? 4 : format == WeightFormat::f32 ? 1 : 2;
  weight.shape({-1, -1, 2, 16, 16, inputs}, "[panels, steps, 2, 16, 16, inputs of a word]").contiguous();
  const int64_t panels = weight.dim(0), steps = weight.dim(1);
  if (whole && in_features > 133000)  // 127 * 127 * K must fit in 32 bits
    weight.fail("of at most 133000 inputs in int8", text(in_features));
  if ((in_features + 16 * inputs - 1) / (16 * inputs) != steps)
    weight.fail(text("of as many steps of ", 16 * inputs, " inputs as K = ", in_features, " needs"), text(steps));
  if ((out_features + 31) / 32 != panels)
    weight.fail(text("of as many panels of 32 outputs as N = ", out_features, " needs"), text(panels));
  cpu::DecoderLinear linear{format,     int(in_features), int(out_features), int(panels),
                            int(steps), weight.data(),    nullptr,           nullptr};
  if (whole)
    linear.scales =
        data_of<float>(TensorView(op, "scales", *scales_).float32().shape({out_features}, "[N]").contiguous());
  linear.bias = maybe_weight(op, "bias", bias_, like, {out_features}, "[N]");
  return linear;
}

void packed_linear(Capsule x_, const LinearParts& parts, Capsule out_, uintptr_t stream, int device) {
  const char* op = "packed_linear";
  TensorView x(op, "x", x_), out(op, "out", out_);
  const int64_t in_features = std::get<3>(parts), out_features = std::get<4>(parts);
  x.floating().shape({-1, in_features}, "[M, K]").row_contiguous();
  out.like(x).shape({x.dim(0), out_features}, "[M, N]").row_contiguous();
  const cpu::DecoderLinear linear = check_linear(op, parts, x);
  if (out.empty()) return;
  if (x.dim(0) > 65535) x.fail("at most 65535 rows", text(x.dim(0)));
  const PackedLinearParams p{int(x.dim(0)), linear.in_features, linear.out_features, linear.panels, linear.steps,
                             linear.format, x.dtype(),          x.data(),            x.stride(0),   linear.weight,
                             linear.scales, linear.bias,        out.data(),          out.stride(0)};
  py::gil_scoped_release nogil;
  backend::packed_linear(p, stream_of(stream, device));
}

cpu::DecoderNorm check_norm(const std::optional<NormParts>& parts, const TensorView& like, int64_t size) {
  if (!parts) return cpu::DecoderNorm{nullptr, 1e-6f, 0, true};
  const auto& [weight, eps, weight_offset, round_first, centred, bias] = *parts;
  const TensorView view = TensorView("decoder", "norm", weight).like(like).shape({size}, "[size]").contiguous();
  const void* added = maybe_weight("decoder", "norm's bias", bias, like, {size}, "[size]");
  return cpu::DecoderNorm{view.data(), float(eps), float(weight_offset), round_first, centred, added};
}

std::optional<cpu::DecoderConv> check_conv(const std::optional<ConvParts>& parts, const TensorView& like,
                                           int64_t hidden) {
  if (!parts) return std::nullopt;
  const auto& [before_, after_, deltas_] = *parts;
  TensorView before("decoder", "before", before_), after("decoder", "after", after_);
  before.like(like).shape({-1, hidden}, "[T, H]").contiguous();
  const int64_t taps = before.dim(0);
  after.like(like).shape({taps, hidden}, "[T, H]").contiguous();
  const cpu::DecoderLinear deltas = check_linear("decoder", deltas_, like);
  const int64_t groups = taps < 1 ? 0 : deltas.out_features / (2 * taps);
  if (taps < 1 || taps > 8 || groups < 1 || deltas.out_features != 2 * taps * groups || hidden % groups != 0)
    before.fail("of 1 to 8 taps whose deltas are 2 T groups", text(taps, " taps and ", deltas.out_features, " deltas"));
  if (deltas.in_features != hidden) before.fail("beside deltas of H inputs", text(deltas.in_features));
  return cpu::DecoderConv{int(taps), int(groups), before.data(), after.data(), deltas};
}

void check_sizes(const char* name, const cpu::DecoderLinear& linear, int64_t in_features, int64_t out_features) {
  if (linear.in_features != in_features || linear.out_features != out_features)
    refuse(text("decoder: ", name, " must be [", out_features, ", ", in_features, "], got [", linear.out_features, ", ",
                linear.in_features, "]"));
}

cpu::DecoderAround check_around(const AroundParts& parts, const TensorView& like, int64_t hidden) {
  const auto& [before, after, scale, conv] = parts;
  return {check_norm(before, like, hidden), check_norm(after, like, hidden), float(scale),
          check_conv(conv, like, hidden)};
}

cpu::DecoderAttention check_attention(const AttentionParts& parts, const TensorView& like, int64_t hidden) {
  const auto& [qkv, output, q_norm, k_norm, sizes, interleaved, scale, window, causal, table] = parts;
  const auto [heads, kv_heads, dim, rotary_dim] = sizes;
  if (dim < 8 || dim % 8 != 0 || dim > 256 || rotary_dim < 0 || rotary_dim > dim || rotary_dim % 2 != 0 ||
      kv_heads < 1 || heads < 1 || heads % kv_heads != 0)
    refuse(text("decoder: sizes must be heads in groups, of a dim that is a multiple of 8 up to 256, got ", heads, ", ",
                kv_heads, ", ", dim, ", ", rotary_dim));
  if (table < 0) refuse(text("decoder: table must be at least 0, got ", table));
  const bool all = q_norm && TensorView("decoder", "norm", std::get<0>(*q_norm)).like(like).dim(0) != dim;
  const cpu::DecoderNorm q = check_norm(q_norm, like, all ? int64_t(heads) * dim : dim),
                         k = check_norm(k_norm, like, all ? int64_t(kv_heads) * dim : dim);
  if (q.centred || k.centred) refuse("decoder: norms of q and k must be RMSNorm, got LayerNorm");
  if (q.eps != k.eps || q.weight_offset != k.weight_offset || q.round_first != k.round_first)
    refuse("decoder: norms of q and k must be of one kind, got two");
  const cpu::DecoderAttention layer{check_linear("decoder", qkv, like),
                                    check_linear("decoder", output, like),
                                    q,
                                    k,
                                    all,
                                    heads,
                                    kv_heads,
                                    dim,
                                    rotary_dim,
                                    interleaved,
                                    float(scale),
                                    window,
                                    causal,
                                    table};
  const int64_t queries = int64_t(heads) * dim;
  check_sizes("qkv", layer.qkv, hidden, queries + 2 * int64_t(kv_heads) * dim);
  check_sizes("output", layer.output, queries, hidden);
  return layer;
}

cpu::DecoderMLP check_mlp(const MLPParts& parts, const TensorView& like, int64_t hidden) {
  const auto& [gate_up, down, name] = parts;
  if (name != "silu" && name != "gelu_tanh")
    refuse(text("decoder: activation must be silu or gelu_tanh, got ", name));
  const auto gate = name == "silu" ? std::optional<Activation>() : Activation::gelu_tanh;
  const cpu::DecoderMLP mlp{check_linear("decoder", gate_up, like), check_linear("decoder", down, like), gate};
  check_sizes("gate_up", mlp.gate_up, hidden, 2 * int64_t(mlp.down.in_features));
  check_sizes("down", mlp.down, mlp.down.in_features, hidden);
  return mlp;
}

class Decoder {
 public:
  // The caller keeps the tensors.
  Decoder(const NormParts& final_norm, const std::vector<LayerParts>& layers) {
    TensorView last("decoder", "final_norm", std::get<0>(final_norm));
    last.floating().shape({-1}, "[H]").contiguous();
    if (layers.empty()) refuse("decoder: layers must be at least one, got none");
    const int64_t hidden = last.dim(0);
    weights_ = {int(hidden), last.dtype(), check_norm(final_norm, last, hidden), {}};
    for (const auto& [attention, mlp, around_attention, around_mlp, parallel] : layers) {
      weights_.layers.push_back({check_attention(attention, last, hidden), check_mlp(mlp, last, hidden),
                                 check_around(around_attention, last, hidden), check_around(around_mlp, last, hidden),
                                 parallel});
      const cpu::DecoderAttention &one = weights_.layers.back().attention, &first = common();
      if (one.num_kv_heads != first.num_kv_heads || one.head_dim != first.head_dim)
        refuse("decoder: layers must have KV heads of one size, got two");
      note_table(size_t(one.table), one.rotary_dim);
    }
  }

  // taken: [taps, B, S, H] for the layers `taps`.
  void forward(Capsule x_, Capsule out_, Capsule k_cache_, Capsule v_cache_, Capsule lengths_, Capsule depths_,
               Capsule visibility_, MaybeCapsule causal_, Capsule k_block_, Capsule v_block_,
               const std::vector<TableParts>& tables, const std::vector<int>& taps, Capsule taken_) const {
    const char* op = "decoder";
    TensorView x(op, "x", x_), out(op, "out", out_), kc(op, "k_cache", k_cache_), vc(op, "v_cache", v_cache_),
        lengths(op, "lengths", lengths_), depths(op, "depths", depths_), visibility(op, "visibility", visibility_),
        kb(op, "k_block", k_block_), vb(op, "v_block", v_block_), taken(op, "taken", taken_);
    const int64_t layers = int64_t(weights_.layers.size()), heads = common().num_kv_heads, dim = common().head_dim;
    x.floating().shape({-1, -1, weights_.hidden}, "[B, S, H]").contiguous();
    if (x.dtype() != weights_.dtype) x.fail("of the weights' dtype", "another");
    const int64_t batch = x.dim(0), slots = x.dim(1);
    if (slots > 64 || batch * slots > 65535) x.fail("at most 64 slots and 65535 rows", text(batch, " x ", slots));
    out.like(x).shape({batch, slots, weights_.hidden}, "[B, S, H]").contiguous();
    kc.like(x).shape({layers, batch, heads, -1, dim}, "[Ly, B, Hkv, L, D]").row_contiguous();
    vc.like(x).shape({layers, batch, heads, kc.dim(3), dim}, "[Ly, B, Hkv, L, D]").row_contiguous();
    for (const TensorView* block : {&kb, &vb})
      block->like(x).shape({layers, batch, heads, slots, dim}, "[Ly, B, Hkv, S, D]").contiguous();
    lengths.int32().shape({batch}, "[B]").contiguous();
    depths.int32().shape({depths.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
    visibility.int64().shape({visibility.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
    taken.like(x).shape({int64_t(taps.size()), batch, slots, weights_.hidden}, "[taps, B, S, H]").contiguous();
    cpu::DecoderCall call{};
    check_tables(tables, call);
    kc.strides_to(call.cache_stride, 4);
    for (int i = 0; i < 4; ++i)
      if (vc.stride(i) != kc.stride(i)) vc.fail("laid out as k_cache", "otherwise");
    if (causal_) {
      TensorView causal(op, "causal", *causal_);
      causal.int64().shape({visibility.dim(0), slots}, "[B or 1, S]").contiguous();
      call.causal = data_of<int64_t>(causal);
    }
    call.taken.assign(size_t(layers), nullptr);
    for (size_t i = 0; i < taps.size(); ++i) {
      if (taps[i] < 0 || taps[i] >= layers)
        refuse(text("decoder: taps must be layers below ", layers, ", got ", taps[i]));
      call.taken[size_t(taps[i])] =
          static_cast<char*>(taken.data()) + int64_t(i) * batch * slots * weights_.hidden * x.element_size();
    }
    if (x.empty()) return;
    if (kc.dim(3) == 0) kc.fail("of at least one row", "none");
    call.batch = int(batch), call.slots = int(slots), call.x = x.data(), call.out = out.data();
    call.k_cache = kc.data(), call.v_cache = vc.data(), call.capacity = kc.dim(3);
    call.k_block = kb.data(), call.v_block = vb.data();
    call.lengths = data_of<int32_t>(lengths), call.depths = data_of<int32_t>(depths);
    call.visibility = data_of<int64_t>(visibility);
    call.depths_stride = depths.dim(0) == 1 ? 0 : slots, call.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
    py::gil_scoped_release nogil;
    cpu::run_decoder(weights_, call);
  }

 private:
  const cpu::DecoderAttention& common() const { return weights_.layers.front().attention; }

  void note_table(size_t table, int rotary_dim) {
    rotary_dims_.resize(std::max(rotary_dims_.size(), table + 1), 0);
    if (rotary_dim == 0) return;
    if (rotary_dims_[table] != 0 && rotary_dims_[table] != rotary_dim)
      refuse("decoder: layers of one table must rotate as many channels, got two numbers");
    rotary_dims_[table] = rotary_dim;
  }

  void check_tables(const std::vector<TableParts>& tables, cpu::DecoderCall& call) const {
    call.tables.resize(rotary_dims_.size());
    if (tables.size() < rotary_dims_.size())
      refuse(text("decoder: tables must be at least ", rotary_dims_.size(), ", got ", tables.size()));
    for (size_t i = 0; i < rotary_dims_.size(); ++i) {
      if (rotary_dims_[i] == 0) continue;
      TensorView cos("decoder", "cos", std::get<0>(tables[i])), sin("decoder", "sin", std::get<1>(tables[i]));
      cos.float32().shape({-1, rotary_dims_[i] / 2}, "[positions, rotary_dim / 2]").contiguous();
      sin.float32().shape({cos.dim(0), rotary_dims_[i] / 2}, "[positions, rotary_dim / 2]").contiguous();
      if (cos.dim(0) == 0) cos.fail("of at least one position", "0");
      call.tables[i] = {data_of<float>(cos), data_of<float>(sin), cos.dim(0)};
    }
  }

  cpu::DecoderWeights weights_;
  std::vector<int> rotary_dims_;  // of each table, 0 where no layer reads it
};

}  // namespace

void define_packed_linear(py::module_& m) {
  m.def("packed_linear", &packed_linear);
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<const NormParts&, const std::vector<LayerParts>&>())
      .def("forward", &Decoder::forward);
}

}  // namespace pydflash
