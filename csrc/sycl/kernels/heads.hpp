// head_norm_rope and context_append: a work-group takes one head's row, normalises it and turns its pairs.
#pragma once

#include "sycl/kernels/add_rms_norm.hpp"

namespace pydflash::sycl_backend {

// How the rows of a call are normalised and turned.
struct HeadRules {
  int head_dim, rotary_dim;
  bool interleaved, round_first;
  float eps, weight_offset;
  int64_t positions;
};

// One row by a whole group: a null weight leaves out the norm, null tables the rotation. `row` is local memory.
template <class T>
void turn_head(::sycl::nd_item<1> item, const HeadRules& rules, const T* from, const T* weight, const float* cos,
               const float* sin, int32_t length, int32_t depth, T* row, T* to) {
  const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0)), half = rules.rotary_dim / 2;
  float squares = 0;
  for (int c = first; c < rules.head_dim; c += step) squares += widen(from[c]) * widen(from[c]);
  squares = ::sycl::reduce_over_group(item.get_group(), squares, ::sycl::plus<float>());
  const float scale = 1.0f / ::sycl::sqrt(squares / float(rules.head_dim) + rules.eps);
  for (int c = first; c < rules.head_dim; c += step)
    row[c] = weight == nullptr
                 ? from[c]
                 : scaled<T>(widen(from[c]), scale, widen(weight[c]), rules.weight_offset, rules.round_first);
  ::sycl::group_barrier(item.get_group());
  int64_t position = int64_t(length) + depth;
  position = position > rules.positions - 1 ? rules.positions - 1 : position;
  position = position < 0 ? 0 : position;
  for (int c = first; c < rules.head_dim; c += step) {
    if (cos == nullptr || c >= rules.rotary_dim) {
      to[c] = row[c];
      continue;
    }
    const bool leads = rules.interleaved ? c % 2 == 0 : c < half;
    const int64_t angle = position * half + (rules.interleaved ? c / 2 : c % half);
    const int other = rules.interleaved ? c ^ 1 : leads ? c + half : c - half;
    const float turned = widen(row[other]) * sin[angle];
    to[c] = narrow<T>(widen(row[c]) * cos[angle] + (leads ? -turned : turned));
  }
}

// RTC f32: HeadNormRope<float>
// RTC bf16: HeadNormRope<bfloat>
// RTC f16: HeadNormRope<half>
template <class T>
struct HeadNormRope {
  const T *qkv, *q_weight, *k_weight;
  const float *cos, *sin;
  const int32_t *lengths, *depths;
  T *q, *k, *v;
  Strides2 qkv_stride;                    // batch, slot
  Strides3 q_stride, k_stride, v_stride;  // batch, head, slot
  int64_t depths_stride;
  int slots, num_heads, num_kv_heads;
  HeadRules rules;
  ::sycl::local_accessor<T, 1> row;

  void operator()(::sycl::nd_item<1> item) const {
    const int heads = num_heads + 2 * num_kv_heads;
    const int64_t group = int64_t(item.get_group(0)), slot = group / heads % slots, b = group / heads / slots;
    const int head = int(group % heads);
    const bool is_q = head < num_heads, is_k = !is_q && head < num_heads + num_kv_heads;
    const int local = is_q ? head : is_k ? head - num_heads : head - num_heads - num_kv_heads;
    const Strides3 stride = is_q ? q_stride : is_k ? k_stride : v_stride;
    T* to = (is_q ? q : is_k ? k : v) + b * stride.a + local * stride.b + slot * stride.c;
    const T* from = qkv + b * qkv_stride.a + slot * qkv_stride.b + int64_t(head) * rules.head_dim;
    turn_head(item, rules, from, is_q ? q_weight : is_k ? k_weight : nullptr, is_q || is_k ? cos : nullptr, sin,
              lengths[b], depths[b * depths_stride + slot], &row[0], to);
  }
};

// RTC f32: ContextAppend<float>
// RTC bf16: ContextAppend<bfloat>
// RTC f16: ContextAppend<half>
template <class T>
struct ContextAppend {
  const T *kv, *k_weights;
  const float *cos, *sin;
  const int32_t *lengths, *counts;
  T *k_cache, *v_cache;
  Strides2 kv_stride;            // batch, row
  Strides4 k_stride, v_stride;  // layer, batch, head, row
  int64_t capacity;
  int layers, rows, num_kv_heads;
  HeadRules rules;
  ::sycl::local_accessor<T, 1> row;

  void operator()(::sycl::nd_item<1> item) const {
    const int heads = 2 * layers * num_kv_heads;
    const int64_t group = int64_t(item.get_group(0)), n = group / heads % rows, b = group / heads / rows;
    const int32_t count = counts[b], length = lengths[b];
    if (n >= count || count - n > capacity) return;  // the whole group
    const int head = int(group % heads), layer = head / (2 * num_kv_heads), place = head % (2 * num_kv_heads);
    const bool is_k = place < num_kv_heads;
    const Strides4 stride = is_k ? k_stride : v_stride;
    T* to = (is_k ? k_cache : v_cache) + layer * stride.a + b * stride.b +
            (is_k ? place : place - num_kv_heads) * stride.c + ring_row(length, int32_t(n), capacity) * stride.d;
    const T* from = kv + b * kv_stride.a + n * kv_stride.b + int64_t(head) * rules.head_dim;
    const T* weight = is_k && k_weights != nullptr ? k_weights + int64_t(layer) * rules.head_dim : nullptr;
    turn_head(item, rules, from, weight, is_k ? cos : nullptr, sin, length, int32_t(n), &row[0], to);
  }
};

}  // namespace pydflash::sycl_backend
