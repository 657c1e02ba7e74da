// Rows of logits: the order of tokens, groups of neighbouring tokens, and the one pass over all rows.
#pragma once

#include "sycl/kernels/fixed.hpp"

namespace pydflash::sycl_backend {

constexpr float kInfinity = __builtin_inff();

// A work-item reads a group, so that nothing depends on the size of a sub-group: 64 or 128 bytes, whole cache lines
// that a GPU's loads of 16 bytes a lane use up one after another.
constexpr int kGroup = 32;
constexpr int kPart = 8;  // of a group that is in registers at a time

inline int num_groups(int vocab_size) { return (vocab_size + kGroup - 1) / kGroup; }

inline float no_nan(float x) { return x == x ? x : -kInfinity; }

// Floats as integers of the same order, never 0; -0 equals +0. Not for NaN.
inline uint32_t ordered(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (bits << 1 == 0) return 0x80000000u;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
inline float from_ordered(uint32_t x) { return bit_cast<float>((x & 0x80000000u) != 0 ? x & 0x7fffffffu : ~x); }

// A token as one integer: larger logits first, then lower ids.
inline uint64_t order_key(float value, int id) { return uint64_t(ordered(value)) << 32 | uint32_t(~id); }
inline float key_value(uint64_t key) { return from_ordered(uint32_t(key >> 32)); }
inline int key_id(uint64_t key) { return int(~uint32_t(key)); }

// Binary exponents per unit of logits: finite and positive, so that no product with an infinity or 0 is a NaN.
inline float rate_of(float temperature) {
  const float rate = 1.44269504f / temperature;
  return rate < 1.17549435e-38f ? 1.17549435e-38f : rate < 3.40282347e38f ? rate : 3.40282347e38f;
}

// e^((x - top) / temperature); top may be infinite.
inline float weight_of(float x, float top, float rate) { return x == top ? 1.0f : ::sycl::exp2((x - top) * rate); }

// The rows of a [batch, slots, vocab_size] tensor of logits.
template <class T>
struct Rows {
  const T* logits;
  Strides2 stride;
  int slots, vocab_size;

  const T* row(int64_t index) const { return logits + index / slots * stride.a + index % slots * stride.b; }
};

template <class T>
void widen_words(const ::sycl::vec<uint32_t, 4>& words, float* x) {
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = bit_cast<float>(words[i]);
    } else {
      x[2 * i] = widen(bit_cast<T>(uint16_t(words[i])));
      x[2 * i + 1] = widen(bit_cast<T>(uint16_t(words[i] >> 16)));
    }
  }
}

// Part of a group as floats; NaN and what lies behind the end of the row read as -inf.
template <class T>
void load_part(const T* row, int vocab_size, int first, float* x) {
  constexpr int kVector = 16 / int(sizeof(T));
  const T* from = row + first;
  const int left = vocab_size - first;
  if (left >= kPart && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
    const auto* words = reinterpret_cast<const ::sycl::vec<uint32_t, 4>*>(from);
    for (int i = 0; i < kPart / kVector; ++i) widen_words<T>(words[i], x + i * kVector);
  } else {
    for (int i = 0; i < kPart; ++i) x[i] = i < left ? widen(from[i]) : -kInfinity;
  }
  for (int i = 0; i < kPart; ++i) x[i] = no_nan(x[i]);
}

// Calls use(first id, floats) for the parts of a group, which are not unrolled: what is done to them is long.
template <class T, class Use>
void each_part(const T* row, int vocab_size, int group, Use use) {
  PYDFLASH_ROLLED
  for (int first = group * kGroup; first < (group + 1) * kGroup; first += kPart) {
    float x[kPart];
    load_part(row, vocab_size, first, x);
    use(first, x);
  }
}

// Of every group of every row the largest logit; in rows of positive temperature also the sum of the weights relative
// to it. Without temperatures there are no sums.
// RTC f32: ScanRows<float>
// RTC bf16: ScanRows<bfloat>
// RTC f16: ScanRows<half>
template <class T>
struct ScanRows {
  const T* logits;
  Strides2 stride;
  int slots, vocab_size;
  int64_t count;  // of all groups
  const float* temperature;
  float *tops, *sums;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int groups = num_groups(vocab_size);
    const int64_t index = at / groups;
    const T* row = Rows<T>{logits, stride, slots, vocab_size}.row(index);
    float x[kGroup];
    for (int i = 0; i < kGroup; i += kPart) load_part(row, vocab_size, int(at % groups) * kGroup + i, x + i);
    float top = x[0];
    for (int i = 1; i < kGroup; ++i) top = x[i] > top ? x[i] : top;
    tops[at] = top;
    if (temperature == nullptr || !(temperature[index / slots] > 0)) return;
    const float rate = rate_of(temperature[index / slots]);
    float sum[4] = {};
    for (int i = 0; i < kGroup; ++i) sum[i % 4] += x[i] > -kInfinity ? weight_of(x[i], top, rate) : 0.0f;
    sums[at] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

}  // namespace pydflash::sycl_backend
