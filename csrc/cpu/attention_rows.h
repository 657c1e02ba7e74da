// The query rows of one KV head (group x slots, folded) against a tile of keys: what a row may see, and the online
// softmax. Scores lie as [key][row], so that rows are lanes and neither maximum nor sum crosses them; a key that a
// row does not see changes no bit of that row's maximum and sums.
#pragma once

#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kRowAlign = 16;  // a multiple of kLanes at every level, and the rows of an AMX tile
constexpr int kMaxRows = 128;  // of one work item
constexpr float kLog2e = 1.44269504f;

// head_dim is a multiple of 8: what is left of a row may be half a vector.
PYDFLASH_FN Floats widen_half(VectorOf<8>::Floats half) {
  Floats whole = splat(0);
  memcpy(&whole, &half, sizeof(whole) < sizeof(half) ? sizeof(whole) : sizeof(half));
  return whole;
}

// a * b + c, rounded once at every level that can: left to the compiler, that could differ from one loop to the next.
PYDFLASH_FN Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
#elif defined(__FMA__)
  return bit_cast<Floats>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
#else
  return a * b + c;
#endif
}

// A vector of a row of head_dim values of which `left` are left, as floats.
template <class T>
PYDFLASH_FN Floats load_row(const T* from, int left) {
  if constexpr (kLanes > 8)
    if (left == 8) return widen_half(load<8>(from));
  return load(from);
}

PYDFLASH_FN int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// The part of a KV head's query that one work item handles: `rows` rows from `first` on. Row r is slot r % slots
// of query head r / slots of the group.
struct RowBlock {
  int batch, kv_head, first, rows, padded;
};

// Per row, as lanes: the context it sees is settled from `first` to `settled` and its tail from `tail` on; the bits
// of the block keys it sees.
struct RowLimits {
  int32_t *first, *settled, *tail, *low_bits, *high_bits;
  int32_t last_first, least_settled;  // between these, every row sees all settled keys
};

// Running state of the online softmax, and the weighted sum of values so far [padded][width].
struct Partial {
  float *sums, *top, *total;
};

// Of keys at `position` and on, those that lie before each row's limit; then those at or after it.
PYDFLASH_FN void mask_before(float* scores, int keys, int padded, const int32_t* limit, int32_t position) {
  for (int j = 0; j < keys; ++j)
    for (int r = 0; r < padded; r += kLanes) {
      float* at = scores + j * padded + r;
      store(at, load_raw<Ints>(limit + r) > position + j ? splat(-INFINITY) : load(at));
    }
}

PYDFLASH_FN void mask_from(float* scores, int keys, int padded, const int32_t* limit, int32_t position) {
  for (int j = 0; j < keys; ++j)
    for (int r = 0; r < padded; r += kLanes) {
      float* at = scores + j * padded + r;
      store(at, load_raw<Ints>(limit + r) > position + j ? load(at) : splat(-INFINITY));
    }
}

PYDFLASH_FN void mask_block(float* scores, int keys, int padded, const RowLimits& limits, int first_key) {
  for (int j = 0; j < keys; ++j) {
    const int key = first_key + j;
    const int32_t* words = key < 32 ? limits.low_bits : limits.high_bits;
    const int32_t bit = int32_t(1u << (key & 31));
    for (int r = 0; r < padded; r += kLanes) {
      float* at = scores + j * padded + r;
      store(at, (load_raw<Ints>(words + r) & bit) == 0 ? splat(-INFINITY) : load(at));
    }
  }
}

// 2^x for x <= 0, and 0 below the normal range: what underflows takes the processor a hundred cycles, so that keys
// which a row does not see would cost it most.
PYDFLASH_FN Floats weight_of(Floats x) {
  const Floats weight = exp2(x < -126.0f ? splat(-126.0f) : x);
  return x < -126.0f ? splat(0) : weight;
}

// Turns scores times `factor` (> 0; units of log2) into weights relative to the running maximum. `decay` is what
// the sums so far must be multiplied with.
PYDFLASH_FN void softmax_tile(float* scores, int keys, int padded, float factor, const Partial& partial,
                              float* decay) {
  for (int r = 0; r < padded; r += kLanes) {
    const Floats before = load(partial.top + r);
    Floats top = before;
    for (int j = 0; j < keys; ++j) top = max(load(scores + j * padded + r) * factor, top);
    // A row that has seen nothing yet is measured from 0: -inf minus -inf would be NaN.
    const Floats from = top == splat(-INFINITY) ? splat(0) : top;
    Floats total = splat(0);
    for (int j = 0; j < keys; ++j) {
      const Floats weight = weight_of(load(scores + j * padded + r) * factor - from);
      store(scores + j * padded + r, weight);
      total += weight;
    }
    const Floats shrink = weight_of(before - from);
    store(decay + r, shrink);
    store(partial.top + r, top);
    store(partial.total + r, load(partial.total + r) * shrink + total);
  }
}

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
