// How block_attention is cut up, what its slots see, and what it costs.
//
// Bytes: a context position of a KV head is read once per tile of query rows, 4 head_dim bytes in 16 bits (8 in
// float). Operations: 4 head_dim with each of the group * slots folded rows, so one row is one operation per byte
// (half in float). 4096 positions of 8 KV heads of 128 are 17 MB, 28 us at 608 GB/s. 32 Xe2 cores that do 128
// multiply-adds a cycle make 23 Tflop/s at 2.8 GHz: memory bounds calls of up to 37 rows (8 slots, groups of 4), and
// 64 rows take at least 1.7 times as long as their bytes. The matrix engines, which would lift that, are not used:
// products are float multiply-adds, which every device has.
#pragma once

#include <cmath>

#include "sycl/kernels/types.hpp"

// For the device's compiler alone. Launches ask the device whether it has sub-groups of 16.
#if defined(__clang__)
#define PYDFLASH_SUB_GROUP_OF_16 [[sycl::reqd_sub_group_size(16)]]
#else
#define PYDFLASH_SUB_GROUP_OF_16
#endif

namespace pydflash::sycl_backend {

constexpr int kStepKeys = 16;  // keys of a step: one per lane

// Everything but pointers. Query rows are (head of the group, slot), folded; a tile is a run of them.
struct AttentionShape {
  int32_t slots, group, kv_heads, head_dim, window, capacity;
  int32_t tile_rows, row_tiles, splits;
  int32_t aligned;  // every row starts on 16 bytes
  float factor;     // scale * log2(e)
  int64_t visibility_stride, depths_stride;
  Strides3 q, k_cache, v_cache, k_block, v_block, out;  // [batch, head, row]
};

// Position of the first context key that a slot of this depth sees; `length` where it sees none.
inline int32_t first_position(const AttentionShape& shape, int32_t length, int32_t depth) {
  int64_t first = length > shape.capacity ? length - shape.capacity : 0;
  if (shape.window > 0) first = ::sycl::max(first, int64_t(length) + depth - shape.window + 1);
  return int32_t(::sycl::min(first, int64_t(length)));
}

// Block keys that slot i sees: its bits, of slots that exist, inside the window.
inline uint64_t visible_slots(const AttentionShape& shape, const int64_t* visibility, const int32_t* depths, int i) {
  uint64_t bits = uint64_t(visibility[i]) & (~uint64_t(0) >> (64 - shape.slots));
  if (shape.window > 0) {
    const int64_t depth = depths[i];
    for (int j = 0; j < shape.slots; ++j) {
      const int64_t distance = depth - depths[j];
      if (distance >= shape.window || -distance >= shape.window) bits &= ~(uint64_t(1) << j);
    }
  }
  return bits;
}

// The cache as a ring, in steps of its rows: those before `wrap` were written last, row 0 at position `turn`. Splits
// take the steps in turn, from the one that holds the first seen position.
struct RingSteps {
  int32_t capacity, wrap, turn, lowest;  // lowest: of the slots' first positions
  int32_t start, all, count;

  RingSteps(int32_t capacity, int32_t length, int32_t lowest) : capacity(capacity), lowest(lowest) {
    wrap = length < capacity ? length : capacity > 0 ? length % capacity : 0;
    turn = length - wrap;
    all = (capacity + kStepKeys - 1) / kStepKeys;
    const bool wraps = lowest < turn;
    start = (lowest - turn + (wraps ? capacity : 0)) / kStepKeys;
    count = ::sycl::min(all, (wrap + kStepKeys - 1) / kStepKeys - start + (wraps ? all : 0));
    if (lowest >= length) count = 0;
  }

  // First cache row of the n-th step.
  int32_t row(int32_t n) const {
    const int32_t step = start + n;
    return (step < all ? step : step - all) * kStepKeys;
  }
  // Position that a cache row holds; negative where there is none.
  int32_t position(int32_t row) const {
    return row >= capacity ? -1 : row < wrap ? turn + row : turn - capacity + row;
  }
};

// 16 bytes of a row, loaded at once where rows are aligned.
using Words = ::sycl::vec<uint32_t, 4>;
using Four = ::sycl::vec<float, 4>;

template <class T>
Words load_words(const T* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Words*>(from);
  Words words;
  PYDFLASH_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = ::sycl::bit_cast<uint32_t>(from[i]);
    } else {
      const uint16_t low = ::sycl::bit_cast<uint16_t>(from[2 * i]);
      words[i] = low | uint32_t(::sycl::bit_cast<uint16_t>(from[2 * i + 1])) << 16;
    }
  }
  return words;
}

// Elements 4 n to 4 n + 3 of the words.
template <class T>
Four unpack(const Words& words, int n) {
  Four four;
  PYDFLASH_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      four[i] = ::sycl::bit_cast<float>(uint32_t(words[i]));
    else
      four[i] = widen(::sycl::bit_cast<T>(uint16_t(words[2 * n + i / 2] >> (i % 2 * 16))));
  }
  return four;
}

// Four columns of a row of the output.
template <class T>
void store_four(T* out, const Four& four, bool aligned) {
  struct alignas(4 * sizeof(T)) Narrow {
    T x[4];
  };
  const Narrow values{narrow<T>(four[0]), narrow<T>(four[1]), narrow<T>(four[2]), narrow<T>(four[3])};
  if (aligned) {
    *reinterpret_cast<Narrow*>(out) = values;
  } else {
    PYDFLASH_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = values.x[i];
  }
}

// What is subtracted before exp2: a row without keys so far has top -inf.
inline float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

}  // namespace pydflash::sycl_backend
