#include "sycl/kernels/delta.hpp"

#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {
namespace {

// Of each slot, in scratch: q and beta, and for a prompt k and the log of the decay, which a block's buffers hold.
struct Prepared {
  float *q, *beta, *k, *g;
  int64_t bytes;
};

Prepared parts_of(const DeltaInputs& in, void* scratch, bool prompt) {
  const int64_t rows = int64_t(in.batch) * in.slots, keys = int64_t(in.key_heads) * in.key_dim;
  char* part = static_cast<char*>(scratch);
  Prepared found{};
  found.q = carve<float>(part, rows * keys), found.beta = carve<float>(part, rows * in.value_heads);
  if (prompt) found.k = carve<float>(part, rows * keys), found.g = carve<float>(part, rows * in.value_heads);
  found.bytes = part - static_cast<char*>(scratch);
  return found;
}

DeltaSizes sizes_of(const DeltaInputs& in) {
  return {in.slots, in.key_heads, in.value_heads, in.key_dim, in.value_dim};
}

template <class T>
void prepare(const char* name, const DeltaInputs& in, const Prepared& at, int64_t k_stride, int64_t g_stride,
             Stream stream) {
  launch<DeltaPrepare<T>>(name, stream, int64_t(in.batch) * in.slots * in.key_heads, 64, static_cast<const T*>(in.x),
                          static_cast<const T*>(in.a), static_cast<const T*>(in.b),
                          Strides2{in.x_stride[0], in.x_stride[1]}, Strides2{in.a_stride[0], in.a_stride[1]},
                          Strides2{in.b_stride[0], in.b_stride[1]}, in.a_log, in.dt_bias, at.q, at.k, at.g, at.beta,
                          k_stride, g_stride, sizes_of(in));
}

int64_t groups_of(const DeltaInputs& in) {
  return int64_t(in.batch) * in.value_heads * (in.value_dim / kDeltaColumns);
}

}  // namespace

void delta_rule(const DeltaRuleParams& p, Stream stream) {
  const DeltaInputs& in = p.in;
  Prepared at = parts_of(in, p.scratch, false);
  at.k = p.block_k, at.g = p.block_g;
  by_dtype(in.dtype, [&](auto type) {
    using T = decltype(type);
    prepare<T>("delta_rule", in, at, p.block_k_stride, p.block_g_stride, stream);
    launch<DeltaRule<T>>("delta_rule", stream, groups_of(in), kDeltaColumns, static_cast<const T*>(in.x),
                         Strides2{in.x_stride[0], in.x_stride[1]}, static_cast<T*>(in.out), p.state, p.kept_k, p.kept_u,
                         p.kept_g, p.kept_count, p.visibility, at.q, at.k, at.g, at.beta, p.block_u, p.state_stride,
                         p.kept_k_stride, p.kept_u_stride, p.kept_g_stride, p.visibility_stride, p.block_k_stride,
                         p.block_u_stride, p.block_g_stride, sizes_of(in), p.kept,
                         Local<float>{int64_t(in.key_dim) * kDeltaColumns});
  });
}

void delta_prompt(const DeltaPromptParams& p, Stream stream) {
  const DeltaInputs& in = p.in;
  const Prepared at = parts_of(in, p.scratch, true);
  by_dtype(in.dtype, [&](auto type) {
    using T = decltype(type);
    prepare<T>("delta_prompt", in, at, int64_t(in.slots) * in.key_heads * in.key_dim,
               int64_t(in.slots) * in.value_heads, stream);
    launch<DeltaPrompt<T>>("delta_prompt", stream, groups_of(in), kDeltaColumns, static_cast<const T*>(in.x),
                           Strides2{in.x_stride[0], in.x_stride[1]}, static_cast<T*>(in.out), p.state, at.q, at.k,
                           at.g, at.beta, p.state_stride, sizes_of(in),
                           Local<float>{int64_t(in.key_dim) * kDeltaColumns});
  });
}

int64_t scratch_bytes(const DeltaRuleParams& p) { return parts_of(p.in, nullptr, false).bytes; }

int64_t scratch_bytes(const DeltaPromptParams& p) { return parts_of(p.in, nullptr, true).bytes; }

}  // namespace pydflash::sycl_backend
