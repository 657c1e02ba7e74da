#include "sycl/kernels/heads.hpp"

#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {
namespace {

template <class Params>
HeadRules rules_of(const Params& p) {
  return {p.head_dim, p.rotary_dim, p.interleaved, p.round_first, p.eps, p.weight_offset, p.positions};
}

// A head of up to 256 channels, two to a work-item.
int threads_for(int head_dim) { return head_dim <= 64 ? 32 : head_dim <= 128 ? 64 : 128; }

Strides3 three(const int64_t* s) { return {s[0], s[1], s[2]}; }
Strides4 four(const int64_t* s) { return {s[0], s[1], s[2], s[3]}; }

}  // namespace

void head_norm_rope(const HeadNormRopeParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<HeadNormRope<T>>(
        "head_norm_rope", stream, int64_t(p.batch) * p.slots * (p.num_heads + 2 * p.num_kv_heads),
        threads_for(p.head_dim), static_cast<const T*>(p.qkv), static_cast<const T*>(p.q_weight),
        static_cast<const T*>(p.k_weight), p.cos, p.sin, p.lengths, p.depths, static_cast<T*>(p.q),
        static_cast<T*>(p.k), static_cast<T*>(p.v), Strides2{p.qkv_stride[0], p.qkv_stride[1]}, three(p.q_stride),
        three(p.k_stride), three(p.v_stride), p.depths_stride, p.slots, p.num_heads, p.num_kv_heads, rules_of(p),
        Local<T>{p.head_dim});
  });
}

void context_append(const ContextAppendParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<ContextAppend<T>>(
        "context_append", stream, int64_t(p.batch) * p.rows * p.layers * 2 * p.num_kv_heads, threads_for(p.head_dim),
        static_cast<const T*>(p.kv), static_cast<const T*>(p.k_weights), p.cos, p.sin, p.lengths, p.counts,
        static_cast<T*>(p.k_cache), static_cast<T*>(p.v_cache), Strides2{p.kv_stride[0], p.kv_stride[1]},
        four(p.k_cache_stride), four(p.v_cache_stride), p.capacity, p.layers, p.rows, p.num_kv_heads, rules_of(p),
        Local<T>{p.head_dim});
  });
}

}  // namespace pydflash::sycl_backend
