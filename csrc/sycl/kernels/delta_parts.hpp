// short_conv, gated_rms_norm and delta_commit.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// A work-item makes one channel of one slot.
// RTC f32: ShortConv<float>
// RTC bf16: ShortConv<bfloat>
// RTC f16: ShortConv<half>
template <class T>
struct ShortConv {
  const T *x, *weight, *bias, *tail;  // bias may be null
  T *block_x, *out;                   // block_x may be null
  const int64_t* visibility;          // null: a chain
  Strides2 x_stride, tail_stride, block_x_stride;
  int64_t visibility_stride;
  int slots, channels, taps;
  int64_t count;  // of outputs

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int c = int(at % channels), slot = int(at / channels % slots);
    const int64_t b = at / channels / slots;
    const T *rows = x + b * x_stride.a + c, *committed = tail + b * tail_stride.a + c;
    uint64_t before = 0;
    if (visibility != nullptr)
      before = uint64_t(visibility[b * visibility_stride + slot]) & ((uint64_t(1) << slot) - 1);
    float sum = bias == nullptr ? 0.0f : widen(bias[c]);
    sum += widen(weight[c]) * widen(rows[slot * x_stride.b]);
    int row = taps - 2;  // of the tail
    for (int t = 1; t < taps; ++t) {
      int parent = slot - t;
      if (visibility != nullptr) {
        parent = before == 0 ? -1 : 63 - int(::sycl::clz(before));
        if (parent >= 0) before &= ~(uint64_t(1) << parent);
      }
      const T value = parent >= 0 ? rows[parent * x_stride.b] : committed[row-- * tail_stride.b];
      sum += widen(weight[int64_t(t) * channels + c]) * widen(value);
    }
    if (block_x != nullptr) block_x[b * block_x_stride.a + slot * block_x_stride.b + c] = rows[slot * x_stride.b];
    const float y = widen(narrow<T>(sum));
    out[at] = narrow<T>(y / (1.0f + ::sycl::exp(-y)));
  }
};

// A work-group takes a head of a row.
// RTC f32: GatedRmsNorm<float>
// RTC bf16: GatedRmsNorm<bfloat>
// RTC f16: GatedRmsNorm<half>
template <class T>
struct GatedRmsNorm {
  const T *x, *gate, *weight;
  T* out;
  int64_t gate_stride;
  int heads, size;
  float eps;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t group = int64_t(item.get_group(0));
    const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0));
    const T *from = x + group * size, *by = gate + group / heads * gate_stride + group % heads * size;
    float squares = 0;
    for (int i = first; i < size; i += step) squares += widen(from[i]) * widen(from[i]);
    squares = ::sycl::reduce_over_group(item.get_group(), squares, ::sycl::plus<float>());
    const float scale = 1.0f / ::sycl::sqrt(squares / float(size) + eps);
    for (int i = first; i < size; i += step) {
      const float y = widen(narrow<T>(widen(narrow<T>(widen(from[i]) * scale)) * widen(weight[i]))), z = widen(by[i]);
      out[group * size + i] = narrow<T>(y * (z / (1.0f + ::sycl::exp(-z))));
    }
  }
};

// Entries of one of the kept tensors: a work-group takes an entry of a row and layer.
// RTC common: DeltaKeep<float>
template <class T>
struct DeltaKeep {
  const T* block;
  T* kept;
  Strides3 from, to;  // layer, batch, slot
  const int32_t* index;
  int32_t* kept_count;  // null but in one launch
  int batch, entries;
  int64_t size;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t group = int64_t(item.get_group(0)), n = group % entries, b = group / entries % batch;
    const int64_t layer = group / entries / batch;
    int count = 0;
    while (count < entries && index[b * entries + count] >= 0) ++count;
    if (kept_count != nullptr && layer == 0 && n == 0 && item.get_local_id(0) == 0) kept_count[b] = count;
    if (n >= count) return;
    const T* row = block + layer * from.a + b * from.b + index[b * entries + n] * from.c;
    T* its = kept + layer * to.a + b * to.b + n * to.c;
    for (int64_t i = int64_t(item.get_local_id(0)); i < size; i += int64_t(item.get_local_range(0))) its[i] = row[i];
  }
};

// The tails: a work-item takes a channel of a row and layer. Strides count elements.
// RTC common: DeltaTail<uint16_t>
// RTC common: DeltaTail<uint32_t>
template <class T>
struct DeltaTail {
  const T* block;
  T* tail;
  Strides3 from, to;  // layer, batch, slot
  const int32_t* index;
  int batch, entries, rows;
  int64_t channels, count;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int64_t c = at % channels, b = at / channels % batch, layer = at / channels / batch;
    const int32_t* slots = index + b * entries;
    int kept = 0;
    while (kept < entries && slots[kept] >= 0) ++kept;
    if (kept == 0) return;
    T* its = tail + layer * to.a + b * to.b + c;
    const T* given = block + layer * from.a + b * from.b + c;
    for (int r = 0; r < rows; ++r) {  // a row lies behind what it is made of
      const int slot = r + kept - rows;
      its[r * to.c] = slot < 0 ? its[(r + kept) * to.c] : given[slots[slot] * from.c];
    }
  }
};

}  // namespace pydflash::sycl_backend
