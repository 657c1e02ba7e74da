// Reading rows of logits in blocks, and the exact top k of a row without sorting it.
// Internal linkage throughout and no std templates: this header is compiled at several instruction-set levels.
#pragma once

#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kBlock = 64;  // elements per block
constexpr int kMaxCandidates = 1024;
constexpr float kInfinity = __builtin_inff();

inline int64_t num_blocks(int64_t size) { return (size + kBlock - 1) / kBlock; }

PYDFLASH_FN Floats drop_nan(Floats x) { return x == x ? x : splat(-kInfinity); }

// Block `b` of a row as floats. NaN reads as -inf, and so does what lies behind the end of the row.
template <class T>
inline void load_block(const T* row, int64_t size, int64_t b, float* out) {
  const T* x = row + b * kBlock;
  const int64_t left = size - b * kBlock;
  if (left >= kBlock) {
    for (int j = 0; j < kBlock; j += kLanes) store(out + j, drop_nan(load(x + j)));
    return;
  }
  for (int j = 0; j < kBlock; ++j) {
    const float value = j < left ? to_float(x[j]) : -kInfinity;
    out[j] = value == value ? value : -kInfinity;
  }
}

PYDFLASH_FN float largest_of(const float* x, int64_t count) {
  float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = x[j] > largest ? x[j] : largest;
  return largest;
}

// maxima[b] = the largest value of block b, NaN counting as -inf: the one pass over the whole row that is always made.
template <class T>
inline void block_maxima(const T* row, int64_t size, float* maxima) {
  const int64_t full = size / kBlock;
  for (int64_t b = 0; b < full; ++b) {
    const T* x = row + b * kBlock;
    Floats top = splat(-kInfinity);
    for (int j = 0; j < kBlock; j += kLanes) top = max(load(x + j), top);  // max keeps `top` where x is NaN
    alignas(64) float lanes[kLanes];
    store(lanes, top);
    maxima[b] = largest_of(lanes, kLanes);
  }
  if (full * kBlock < size) {
    alignas(64) float x[kBlock];
    load_block(row, size, full, x);
    maxima[full] = largest_of(x, kBlock);
  }
}

// A (value, id) pair as one integer: larger values first, then lower ids. -0 equals +0.
inline uint64_t order_key(float value, int64_t id) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(ordered) << 32 | uint32_t(~uint32_t(id));
}
inline float key_value(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return bit_cast<float>(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}
inline int64_t key_id(uint64_t key) { return uint32_t(~uint32_t(key)); }

inline void sift_down(uint64_t* heap, int size, int at) {
  const uint64_t key = heap[at];
  for (int child; (child = 2 * at + 1) < size; at = child) {
    if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
    if (key <= heap[child]) break;
    heap[at] = heap[child];
  }
  heap[at] = key;
}

// Keeps the `k` largest of the keys pushed so far in a min-heap, which is in order once it is full.
struct Largest {
  uint64_t* heap;
  int k, size = 0;

  void push(uint64_t key) {
    if (size < k) {
      heap[size++] = key;
      if (size == k)
        for (int at = k / 2 - 1; at >= 0; --at) sift_down(heap, k, at);
    } else if (key > heap[0]) {
      heap[0] = key;
      sift_down(heap, k, 0);
    }
  }
};

// Sorts from the largest to the smallest.
inline void sort_descending(uint64_t* keys, int size) {
  for (int at = size / 2 - 1; at >= 0; --at) sift_down(keys, size, at);
  for (int last = size - 1; last > 0; --last) {
    const uint64_t smallest = keys[0];
    keys[0] = keys[last];
    keys[last] = smallest;
    sift_down(keys, last, 0);
  }
}

// The k <= min(size, kMaxCandidates) largest of a row in order, as order_keys, given its block maxima.
// They lie in the k blocks whose maxima come first: each of those holds one element ahead of any other block's.
template <class T>
inline void top_k(const T* row, int64_t size, const float* maxima, int k, uint64_t* keys) {
  const int64_t blocks = num_blocks(size);
  uint64_t chosen[kMaxCandidates];
  Largest best_blocks{chosen, k};
  for (int64_t b = 0; b < blocks; ++b) best_blocks.push(order_key(maxima[b], b));
  const float least = best_blocks.size == k ? key_value(chosen[0]) : -kInfinity;

  Largest best{keys, k};
  alignas(64) float x[kBlock];
  for (int c = 0; c < best_blocks.size; ++c) {
    const int64_t b = key_id(chosen[c]);
    load_block(row, size, b, x);
    const int count = size - b * kBlock < kBlock ? int(size - b * kBlock) : kBlock;
    for (int j = 0; j < count; ++j)
      if (x[j] >= least) best.push(order_key(x[j], b * kBlock + j));
  }
  sort_descending(keys, k);
}

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
