// Every step is a kernel of its own, called without the cost of a call from Python.
#include "cpu/decoder.h"

#include <algorithm>
#include <cstring>

#define PYDFLASH_LEVEL no_level  // compiled once
#include "cpu/kept.h"

namespace pydflash::cpu {
namespace {

class Forward {
 public:
  Forward(const DecoderWeights& weights, const DecoderCall& call)
      : w_(weights),
        c_(call),
        rows_(call.batch * call.slots),
        element_(weights.dtype == DType::f32 ? 4 : 2),
        row_bytes_(int64_t(weights.hidden) * element_) {}

  void operator()() {
    carve();
    norm(c_.x, nullptr, w_.layers[0].around_attention.norm, u_);
    for (size_t i = 0; i < w_.layers.size(); ++i) {
      const DecoderLayer& layer = w_.layers[i];
      const bool last = i + 1 == w_.layers.size();
      const void* y =
          convolved(layer.around_attention.conv, [&](const void* u, void* out) { attention(int(i), u, out); });
      norm(i == 0 ? c_.x : residual_, y, layer.around_mlp.norm, u_);
      y = convolved(layer.around_mlp.conv, [&](const void* u, void* out) { mlp(layer.mlp, u, out); });
      norm(residual_, y, last ? w_.final_norm : w_.layers[i + 1].around_attention.norm, last ? c_.out : u_);
      if (c_.taken[i] != nullptr) std::memcpy(c_.taken[i], residual_, size_t(rows_ * row_bytes_));
    }
  }

 private:
  void carve() {
    int64_t wide = 0, narrow = 0, deltas = 0;
    for (const DecoderLayer& layer : w_.layers) {
      wide = std::max<int64_t>({wide, layer.attention.qkv.out_features, layer.mlp.gate_up.out_features});
      narrow = std::max<int64_t>({narrow, layer.attention.output.in_features, layer.mlp.down.in_features});
      for (const auto* conv : {&layer.around_attention.conv, &layer.around_mlp.conv})
        if (*conv) deltas = std::max<int64_t>(deltas, (*conv)->deltas.out_features);
    }
    const int64_t widths[] = {w_.hidden, w_.hidden, w_.hidden, w_.hidden, wide, narrow, narrow, deltas};
    void** const places[] = {&u_, &residual_, &y_, &convolved_, &wide_, &narrow_, &queries_, &deltas_};
    static thread_local no_level::KeptMemory kept;
    int64_t bytes = 0;
    const auto size = [&](int64_t width) { return (width * rows_ * element_ + 63) / 64 * 64; };
    for (int64_t width : widths) bytes += size(width);
    char* at = kept.reserve(size_t(bytes));
    for (int i = 0; i < 8; ++i) *places[i] = at, at += size(widths[i]);
  }

  // out = norm(x + delta); with a delta the sum goes to the residual stream.
  void norm(const void* x, const void* delta, const DecoderNorm& norm, void* out) const {
    AddRmsNormParams p{};
    p.rows = rows_, p.size = w_.hidden, p.dtype = w_.dtype;
    p.x = x, p.delta = delta, p.weight = norm.weight, p.out = out, p.sum = delta == nullptr ? nullptr : residual_;
    p.eps = norm.eps, p.weight_offset = norm.weight_offset, p.round_first = norm.round_first;
    p.x_stride = p.delta_stride = p.out_stride = w_.hidden;
    add_rms_norm(p, {});
  }

  void linear(const DecoderLinear& layer, const void* x, void* out) const {
    packed_linear(
        PackedLinearParams{rows_, layer.in_features, layer.out_features, layer.panels, layer.steps, layer.format,
                           w_.dtype, x, layer.in_features, layer.weight, layer.scales, layer.bias, out,
                           layer.out_features},
        {});
  }

  void convolve(const DecoderConv& conv, const void* x, const void* base, int which, void* out) const {
    const int64_t taps = conv.taps, groups = conv.groups, slot = 2 * taps * groups;
    BlockConvParams p{c_.batch,
                      c_.slots,
                      w_.hidden,
                      conv.taps,
                      conv.groups,
                      w_.dtype,
                      x,
                      base,
                      static_cast<const char*>(deltas_) + which * taps * groups * element_,
                      out,
                      {int64_t(c_.slots) * w_.hidden, w_.hidden},
                      {c_.slots * slot, slot, groups}};
    block_conv(p, {});
  }

  // run(input, output) between the convolutions, where there are some. Returns where the result is.
  template <class Run>
  const void* convolved(const std::optional<DecoderConv>& conv, Run run) {
    if (!conv) {
      run(u_, y_);
      return y_;
    }
    linear(conv->deltas, u_, deltas_);
    convolve(*conv, u_, conv->before, 0, convolved_);
    run(convolved_, y_);
    convolve(*conv, y_, conv->after, 1, convolved_);
    return convolved_;
  }

  void mlp(const DecoderMLP& mlp, const void* u, void* out) const {
    linear(mlp.gate_up, u, wide_);
    const int size = mlp.down.in_features;
    swiglu(SwigluParams{rows_, size, w_.dtype, wide_, narrow_, 2 * int64_t(size), size}, {});
    linear(mlp.down, narrow_, out);
  }

  void attention(int i, const void* u, void* out) const {
    const DecoderAttention& layer = w_.layers[size_t(i)].attention;
    const int64_t dim = layer.head_dim, slots = c_.slots, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
    const int64_t block = c_.batch * kv_heads * slots * dim * i;
    void* k = static_cast<char*>(c_.k_block) + block * element_;
    void* v = static_cast<char*>(c_.v_block) + block * element_;
    linear(layer.qkv, u, wide_);
    HeadNormRopeParams h{};
    h.batch = c_.batch, h.slots = c_.slots, h.num_heads = layer.num_heads, h.num_kv_heads = layer.num_kv_heads;
    h.head_dim = layer.head_dim, h.rotary_dim = layer.rotary_dim, h.interleaved = layer.interleaved;
    h.round_first = layer.q_norm.round_first, h.eps = layer.q_norm.eps, h.weight_offset = layer.q_norm.weight_offset;
    h.dtype = w_.dtype, h.qkv = wide_, h.qkv_stride[0] = slots * layer.qkv.out_features;
    h.qkv_stride[1] = layer.qkv.out_features;
    h.q_weight = layer.q_norm.weight, h.k_weight = layer.k_norm.weight;
    h.cos = c_.cos, h.sin = c_.sin, h.positions = c_.positions;
    h.lengths = c_.lengths, h.depths = c_.depths, h.depths_stride = c_.depths_stride;
    h.q = queries_, h.k = k, h.v = v;
    const int64_t q_stride[3] = {heads * slots * dim, slots * dim, dim};
    const int64_t kv_stride[3] = {kv_heads * slots * dim, slots * dim, dim};
    const int64_t out_stride[3] = {slots * heads * dim, dim, heads * dim};  // [batch, slot, head] in memory
    std::copy(q_stride, q_stride + 3, h.q_stride);
    std::copy(kv_stride, kv_stride + 3, h.k_stride), std::copy(kv_stride, kv_stride + 3, h.v_stride);
    head_norm_rope(h, {});

    BlockAttentionParams a{};
    a.batch = c_.batch, a.num_heads = layer.num_heads, a.num_kv_heads = layer.num_kv_heads, a.slots = c_.slots;
    a.head_dim = layer.head_dim, a.window = layer.window, a.capacity = c_.capacity, a.scale = layer.scale;
    a.dtype = w_.dtype, a.q = queries_, a.k_block = k, a.v_block = v, a.out = narrow_;
    const int64_t cached = c_.cache_stride[0] * i * element_;
    a.k_cache = static_cast<const char*>(c_.k_cache) + cached;
    a.v_cache = static_cast<const char*>(c_.v_cache) + cached;
    std::copy(q_stride, q_stride + 3, a.q_stride), std::copy(out_stride, out_stride + 3, a.out_stride);
    std::copy(kv_stride, kv_stride + 3, a.k_block_stride), std::copy(kv_stride, kv_stride + 3, a.v_block_stride);
    std::copy(c_.cache_stride + 1, c_.cache_stride + 4, a.k_cache_stride);
    std::copy(c_.cache_stride + 1, c_.cache_stride + 4, a.v_cache_stride);
    a.lengths = c_.lengths, a.depths = c_.depths, a.depths_stride = c_.depths_stride;
    a.visibility = layer.causal && c_.causal != nullptr ? c_.causal : c_.visibility;
    a.visibility_stride = c_.visibility_stride;
    block_attention(a, {});
    linear(layer.output, narrow_, out);
  }

  const DecoderWeights& w_;
  const DecoderCall& c_;
  int rows_;
  int64_t element_, row_bytes_;
  void *u_, *residual_, *y_, *convolved_, *wide_, *narrow_, *queries_, *deltas_;
};

}  // namespace

void run_decoder(const DecoderWeights& weights, const DecoderCall& call) { Forward{weights, call}(); }

}  // namespace pydflash::cpu
