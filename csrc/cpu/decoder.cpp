// Every step is a kernel of its own, called without the cost of a call from Python.
#include "cpu/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define PYDFLASH_LEVEL no_level  // compiled once
#include "cpu/crew.h"
#include "cpu/kept.h"
#include "cpu/vector.h"

namespace pydflash::cpu {
namespace {

// out = run(x), number by number, of rows without gaps; run(type, values, the first's place, count). out may be x.
template <class Run>
void each_number(DType dtype, int rows, int size, const void* x, void* out, Run run) {
  using namespace no_level;
  by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    in_shares(rows, threads_for(int64_t(rows) * size, 1 << 14), [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row)
        by_vectors(size, [&](int i, int count) {
          const int64_t at = row * size + i;
          store_some(static_cast<T*>(out) + at, run(type, load_some(static_cast<const T*>(x) + at, count), at, count),
                     count);
        });
    });
  });
}

// LayerNorm of rows [rows, size] without gaps; out may be x.
void layer_norm(DType dtype, int rows, int size, const void* x, const DecoderNorm& norm, void* out) {
  using namespace no_level;
  by_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
    in_shares(rows, threads_for(int64_t(rows) * size, 1 << 14), [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const T* from = static_cast<const T*>(x) + row * size;
        T* to = static_cast<T*>(out) + row * size;
        Floats sum{}, squares{};
        by_vectors(size, [&](int i, int count) { sum += load_some(from + i, count); });
        const float mean = sum_lanes(sum) / float(size);
        by_vectors(size, [&](int i, int count) {
          float part[kLanes] = {};  // lanes behind the row would count as -mean
          store_some(part, load_some(from + i, count) - mean, count);
          const Floats apart = load(part);
          squares += apart * apart;
        });
        const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + norm.eps);
        by_vectors(size, [&](int i, int count) {
          Floats y = (load_some(from + i, count) - mean) * scale * load_some(weight + i, count);
          if (bias != nullptr) y += load_some(bias + i, count);
          store_some(to + i, y, count);
        });
      }
    });
  });
}

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
    const void* u = enter(c_.x, nullptr, w_.layers[0].around_attention.before, u_);
    for (size_t i = 0; i < w_.layers.size(); ++i) {
      const DecoderLayer& layer = w_.layers[i];
      const bool last = i + 1 == w_.layers.size();
      const void* y = around(layer.around_attention, u, [&](const void* in, void* out) { attention(int(i), in, out); });
      const void* x = i == 0 ? c_.x : residual_;
      if (layer.parallel)
        add(x, y);
      else
        u = enter(x, y, layer.around_mlp.before, u_);
      y = around(layer.around_mlp, u, [&](const void* in, void* out) { mlp(layer.mlp, in, out); });
      u = enter(residual_, y, last ? w_.final_norm : w_.layers[i + 1].around_attention.before, last ? c_.out : u_);
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

  // The residual stream = x + delta.
  void add(const void* x, const void* delta) const {
    using no_level::Floats;
    each_number(w_.dtype, rows_, w_.hidden, x, residual_, [&](auto type, Floats value, int64_t at, int count) {
      return value + no_level::load_some(static_cast<const decltype(type)*>(delta) + at, count);
    });
  }

  void scale(void* x, float by) const {
    using no_level::Floats;
    each_number(w_.dtype, rows_, w_.hidden, x, x, [&](auto, Floats value, int64_t, int) { return value * by; });
  }

  // Where norm(x + delta), or x + delta without a norm, is: `out` or the residual stream, to which a sum goes.
  const void* enter(const void* x, const void* delta, const DecoderNorm& before, void* out) const {
    if (before.weight != nullptr) return norm(x, delta, before, w_.hidden, w_.hidden, out), out;
    if (delta == nullptr) return x;
    add(x, delta);
    return residual_;
  }

  // out = norm(x + delta), of rows that lie `stride` apart; out may be x.
  void norm(const void* x, const void* delta, const DecoderNorm& norm, int size, int64_t stride, void* out) const {
    if (norm.centred) {  // of the hidden size alone
      if (delta != nullptr) add(x, delta);
      return layer_norm(w_.dtype, rows_, size, delta == nullptr ? x : residual_, norm, out);
    }
    AddRmsNormParams p{};
    p.rows = rows_, p.size = size, p.dtype = w_.dtype;
    p.x = x, p.delta = delta, p.weight = norm.weight, p.out = out, p.sum = delta == nullptr ? nullptr : residual_;
    p.eps = norm.eps, p.weight_offset = norm.weight_offset, p.round_first = norm.round_first;
    p.x_stride = p.delta_stride = p.out_stride = stride;
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

  // What is added to the residual stream of what run(input, output) gives for u. Returns where it is.
  template <class Run>
  const void* around(const DecoderAround& around, const void* u, Run run) {
    void* y = convolved(around.conv, u, run);
    if (around.after.weight != nullptr) norm(y, nullptr, around.after, w_.hidden, w_.hidden, y);
    if (around.scale != 1) scale(y, around.scale);
    return y;
  }

  // run(input, output) between the convolutions, where there are some. Returns where the result is.
  template <class Run>
  void* convolved(const std::optional<DecoderConv>& conv, const void* u, Run run) {
    if (!conv) {
      run(u, y_);
      return y_;
    }
    linear(conv->deltas, u, deltas_);
    convolve(*conv, u, conv->before, 0, convolved_);
    run(convolved_, y_);
    convolve(*conv, y_, conv->after, 1, convolved_);
    return convolved_;
  }

  void mlp(const DecoderMLP& mlp, const void* u, void* out) const {
    linear(mlp.gate_up, u, wide_);
    const int size = mlp.down.in_features;
    if (mlp.gate) {
      const void* up = static_cast<const char*>(wide_) + size * element_;
      const int64_t stride = 2 * int64_t(size);
      apply_gate(ApplyGateParams{rows_, size, *mlp.gate, w_.dtype, up, wide_, narrow_, stride, stride}, {});
    } else {
      swiglu(SwigluParams{rows_, size, w_.dtype, wide_, narrow_, 2 * int64_t(size), size}, {});
    }
    linear(mlp.down, narrow_, out);
  }

  void attention(int i, const void* u, void* out) const {
    const DecoderAttention& layer = w_.layers[size_t(i)].attention;
    const int64_t dim = layer.head_dim, slots = c_.slots, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
    const int64_t block = c_.batch * kv_heads * slots * dim * i;
    void* k = static_cast<char*>(c_.k_block) + block * element_;
    void* v = static_cast<char*>(c_.v_block) + block * element_;
    linear(layer.qkv, u, wide_);
    if (layer.norm_all) {
      char* keys = static_cast<char*>(wide_) + heads * dim * element_;
      norm(wide_, nullptr, layer.q_norm, int(heads * dim), layer.qkv.out_features, wide_);
      norm(keys, nullptr, layer.k_norm, int(kv_heads * dim), layer.qkv.out_features, keys);
    }
    HeadNormRopeParams h{};
    h.batch = c_.batch, h.slots = c_.slots, h.num_heads = layer.num_heads, h.num_kv_heads = layer.num_kv_heads;
    h.head_dim = layer.head_dim, h.rotary_dim = layer.rotary_dim, h.interleaved = layer.interleaved;
    h.round_first = layer.q_norm.round_first, h.eps = layer.q_norm.eps, h.weight_offset = layer.q_norm.weight_offset;
    h.dtype = w_.dtype, h.qkv = wide_, h.qkv_stride[0] = slots * layer.qkv.out_features;
    h.qkv_stride[1] = layer.qkv.out_features;
    if (!layer.norm_all) h.q_weight = layer.q_norm.weight, h.k_weight = layer.k_norm.weight;
    const DecoderTable& table = c_.tables[size_t(layer.table)];
    h.cos = table.cos, h.sin = table.sin, h.positions = table.positions;
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
