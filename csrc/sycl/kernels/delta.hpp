// delta_rule and delta_prompt: a work-item takes one column of a head's state, which no other column ever meets.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

constexpr int kDeltaColumns = 16;  // of a work-group

struct DeltaSizes {
  int slots, key_heads, value_heads, key_dim, value_dim;
};

// Of every slot: q and k of length 1, the log of its decay, and beta. A work-group takes a slot and a key head.
// RTC f32: DeltaPrepare<float>
// RTC bf16: DeltaPrepare<bfloat>
// RTC f16: DeltaPrepare<half>
template <class T>
struct DeltaPrepare {
  const T *x, *a, *b;
  Strides2 x_stride, a_stride, b_stride;  // batch, slot
  const float *a_log, *dt_bias;
  float *q, *k, *g, *beta;     // [batch, slots, ...]
  int64_t k_stride, g_stride;  // batch
  DeltaSizes sizes;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t group = int64_t(item.get_group(0)), head = group % sizes.key_heads, row = group / sizes.key_heads;
    const int64_t slot = row % sizes.slots, batch = row / sizes.slots;
    const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0)), dim = sizes.key_dim;
    const int64_t keys = int64_t(sizes.key_heads) * dim;
    const T* from = x + batch * x_stride.a + slot * x_stride.b + head * dim;
    unit(item, from, q + row * keys + head * dim, 1.0f / ::sycl::sqrt(float(dim)));
    unit(item, from + keys, k + batch * k_stride + slot * keys + head * dim, 1.0f);
    const int share = sizes.value_heads / sizes.key_heads;
    for (int h = int(head) * share + first; h < int(head + 1) * share; h += step) {
      const float shifted = widen(a[batch * a_stride.a + slot * a_stride.b + h]) + dt_bias[h];
      const float soft = shifted > 20.0f ? shifted : ::sycl::log1p(::sycl::exp(shifted));
      const float raw = widen(b[batch * b_stride.a + slot * b_stride.b + h]);
      g[batch * g_stride + slot * sizes.value_heads + h] = -::sycl::exp(a_log[h]) * soft;
      beta[row * sizes.value_heads + h] = widen(narrow<T>(1.0f / (1.0f + ::sycl::exp(-raw))));
    }
  }

  void unit(::sycl::nd_item<1> item, const T* from, float* to, float scale) const {
    const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0));
    float squares = 0;
    for (int d = first; d < sizes.key_dim; d += step) squares += widen(from[d]) * widen(from[d]);
    squares = ::sycl::reduce_over_group(item.get_group(), squares, ::sycl::plus<float>());
    const float factor = 1.0f / ::sycl::sqrt(squares + 1e-6f);
    for (int d = first; d < sizes.key_dim; d += step) to[d] = widen(from[d]) * factor * scale;
  }
};

// A column of a state in local memory, [key_dim] numbers kDeltaColumns apart.
struct DeltaColumn {
  float* s;
  int dim;

  void load(const float* state, int value_dim) const {
    for (int d = 0; d < dim; ++d) s[d * kDeltaColumns] = state[int64_t(d) * value_dim];
  }
  void store(float* state, int value_dim) const {
    for (int d = 0; d < dim; ++d) state[int64_t(d) * value_dim] = s[d * kDeltaColumns];
  }
  float along(const float* factor) const {
    float sum = 0;
    for (int d = 0; d < dim; ++d) sum = ::sycl::fma(s[d * kDeltaColumns], factor[d], sum);
    return sum;
  }
  // The only way from a state to the next, so that a commit repeats a slot to the last bit.
  void move(float decay, const float* k, float u) const {
    for (int d = 0; d < dim; ++d) s[d * kDeltaColumns] = ::sycl::fma(s[d * kDeltaColumns], decay, k[d] * u);
  }
};

// The slots in order. One whose parent is not the slot before goes from the state along its path again: what its
// ancestors added is known by then.
// RTC f32: DeltaRule<float>
// RTC bf16: DeltaRule<bfloat>
// RTC f16: DeltaRule<half>
template <class T>
struct DeltaRule {
  const T* x;
  Strides2 x_stride;
  T* out;
  float* state;
  const float *kept_k, *kept_u, *kept_g;
  const int32_t* kept_count;
  const int64_t* visibility;
  const float *q, *k, *g, *beta;
  float* u;
  int64_t state_stride, kept_k_stride, kept_u_stride, kept_g_stride, visibility_stride, k_stride, u_stride, g_stride;
  DeltaSizes sizes;
  int kept;
  ::sycl::local_accessor<float, 1> tile;

  void operator()(::sycl::nd_item<1> item) const {
    const int tiles = sizes.value_dim / kDeltaColumns;
    const int64_t group = int64_t(item.get_group(0)), batch = group / tiles / sizes.value_heads;
    const int head = int(group / tiles % sizes.value_heads);
    const int column = int(group % tiles) * kDeltaColumns + int(item.get_local_id(0));
    const int key_head = head / (sizes.value_heads / sizes.key_heads);
    const int64_t keys = int64_t(sizes.key_heads) * sizes.key_dim, values = int64_t(sizes.value_heads) * sizes.value_dim;
    const int64_t key = int64_t(key_head) * sizes.key_dim, value = int64_t(head) * sizes.value_dim + column;
    float* own = state + batch * state_stride + int64_t(head) * sizes.key_dim * sizes.value_dim + column;
    const DeltaColumn s{&tile[item.get_local_id(0)], sizes.key_dim};
    s.load(own, sizes.value_dim);
    const int count = ::sycl::clamp(int(kept_count[batch]), 0, kept);
    for (int n = 0; n < count; ++n)
      s.move(::sycl::exp(kept_g[batch * kept_g_stride + int64_t(n) * sizes.value_heads + head]),
             kept_k + batch * kept_k_stride + n * keys + key, kept_u[batch * kept_u_stride + n * values + value]);
    if (count > 0) s.store(own, sizes.value_dim);
    for (int i = 0; i < sizes.slots; ++i) {
      const uint64_t before = uint64_t(visibility[batch * visibility_stride + i]) & ((uint64_t(1) << i) - 1);
      if (before == 0 || (before >> (i - 1) & 1) == 0) {  // the parent is the highest ancestor
        if (i > 0) s.load(own, sizes.value_dim);
        for (int j = 0; j < i; ++j)
          if (before >> j & 1)
            s.move(decay(batch, j, head), k + batch * k_stride + j * keys + key, u[batch * u_stride + j * values + value]);
      }
      const float* its = k + batch * k_stride + i * keys + key;
      const float v = widen(x[batch * x_stride.a + i * x_stride.b + 2 * keys + value]);
      const float e = decay(batch, i, head);
      const float add = (v - s.along(its) * e) * beta[(batch * sizes.slots + i) * sizes.value_heads + head];
      u[batch * u_stride + i * values + value] = add;
      s.move(e, its, add);
      out[(batch * sizes.slots + i) * values + value] = narrow<T>(s.along(q + (batch * sizes.slots + i) * keys + key));
    }
  }

  float decay(int64_t batch, int slot, int head) const {
    return ::sycl::exp(g[batch * g_stride + int64_t(slot) * sizes.value_heads + head]);
  }
};

// A chain, which the state follows.
// RTC f32: DeltaPrompt<float>
// RTC bf16: DeltaPrompt<bfloat>
// RTC f16: DeltaPrompt<half>
template <class T>
struct DeltaPrompt {
  const T* x;
  Strides2 x_stride;
  T* out;
  float* state;
  const float *q, *k, *g, *beta;
  int64_t state_stride;
  DeltaSizes sizes;
  ::sycl::local_accessor<float, 1> tile;

  void operator()(::sycl::nd_item<1> item) const {
    const int tiles = sizes.value_dim / kDeltaColumns;
    const int64_t group = int64_t(item.get_group(0)), batch = group / tiles / sizes.value_heads;
    const int head = int(group / tiles % sizes.value_heads);
    const int column = int(group % tiles) * kDeltaColumns + int(item.get_local_id(0));
    const int key_head = head / (sizes.value_heads / sizes.key_heads);
    const int64_t keys = int64_t(sizes.key_heads) * sizes.key_dim, values = int64_t(sizes.value_heads) * sizes.value_dim;
    const int64_t key = int64_t(key_head) * sizes.key_dim, value = int64_t(head) * sizes.value_dim + column;
    float* own = state + batch * state_stride + int64_t(head) * sizes.key_dim * sizes.value_dim + column;
    const DeltaColumn s{&tile[item.get_local_id(0)], sizes.key_dim};
    s.load(own, sizes.value_dim);
    for (int i = 0; i < sizes.slots; ++i) {
      const int64_t row = batch * sizes.slots + i, at = row * sizes.value_heads + head;
      const float* its = k + row * keys + key;
      const float v = widen(x[batch * x_stride.a + i * x_stride.b + 2 * keys + value]), e = ::sycl::exp(g[at]);
      const float add = (v - s.along(its) * e) * beta[at];
      s.move(e, its, add);
      out[row * values + value] = narrow<T>(s.along(q + row * keys + key));
    }
    s.store(own, sizes.value_dim);
  }
};

}  // namespace pydflash::sycl_backend
