// bf16 products without widening: a 32-bit word holds two neighbours, of head_dim in queries and keys, of keys in
// weights and values. Sums are in float; weights are rounded to bf16, as the matrix units of these machines want.
#pragma once

#include "cpu/attention_words.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// Up to 32 values of a row, the rest zero.
PYDFLASH_FN __m512i load_pairs(const bf16* from, int64_t left) {
  return _mm512_maskz_loadu_epi16(left < 32 ? (__mmask32(1) << left) - 1 : ~__mmask32(0), from);
}

// What both kinds of bf16 products do with their operands.
struct Pairs {
  // The sign of the scale goes into the query, where it is exact; the scores are multiplied with the rest.
  static PYDFLASH_FN float factor_of(float scale) { return scale == 0 ? 1 : scale < 0 ? -scale : scale; }

  // 16 rows of the query as [words][row], words beyond head_dim zero.
  static void query_rows(const bf16* const* q, int dim, float scale, int words, int padded, float* out) {
    const __m512i flip = _mm512_set1_epi16(scale < 0 ? short(0x8000) : short(0));
    for (int w = 0; w < words; w += 16) {
      Floats tile[16];
      for (int i = 0; i < 16; ++i) {
        const __m512i row = _mm512_xor_si512(load_pairs(q[i] + 2 * w, dim - 2 * w), flip);
        tile[i] = scale == 0 ? splat(0) : bit_cast<Floats>(row);
      }
      transpose(tile);
      for (int i = 0; i < 16 && w + i < words; ++i) store(out + int64_t(w + i) * padded, tile[i]);
    }
  }

  // Values of keys 2j and 2j + 1 side by side, as [pairs][width]; keys from `keys` on are zero.
  static void values(const bf16* v, int64_t stride, int keys, int pairs, int dim, int width, float* out) {
    const __m512i low = interleaved(0), high = interleaved(16);
    for (int j = 0; j < pairs; ++j, out += width)
      for (int d = 0; d < dim; d += 32) {
        const int64_t even = 2 * j < keys ? dim - d : 0, odd = 2 * j + 1 < keys ? dim - d : 0;
        const __m512i a = load_pairs(v + 2 * j * stride + d, even), b = load_pairs(v + (2 * j + 1) * stride + d, odd);
        _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, low, b));
        if (d + 16 < width) _mm512_storeu_si512(out + d + 16, _mm512_permutex2var_epi16(a, high, b));
      }
  }

  // 16 rows of the weights of two keys.
  static PYDFLASH_FN Floats weights(Floats even, Floats odd) {
    const __m512bh both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(odd), bit_cast<__m512>(even));
    const __m512i words = bit_cast<__m512i>(both);
    return bit_cast<Floats>(_mm512_permutexvar_epi16(interleaved(0, 16), words));
  }

 private:
  // Word indices first, first + 32, first + 1, ... (of two vectors; `apart` tells where the second one begins).
  static PYDFLASH_FN __m512i interleaved(int first, int apart = 32) {
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i even = _mm512_add_epi32(count, _mm512_set1_epi32(first));
    return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(apart)), 16));
  }
};

struct PairWords {
  static PYDFLASH_FN Floats dot(Floats sum, const int32_t* single, const int32_t* lanes) {
    const __m512i pair = _mm512_set1_epi32(load_raw<int32_t>(single)), others = load_raw<__m512i>(lanes);
    return bit_cast<Floats>(
        _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(others), bit_cast<__m512bh>(pair)));
  }
};

// Products with VDPBF16PS.
class PairProducts {
 public:
  using Type = bf16;
  static constexpr int kKeys = 96, kGroup = 2;

  static int64_t scratch_floats(int padded, int dim) {
    return int64_t(dim) / 2 * padded + kKeys / 2 * round_up(dim, kRowAlign);
  }

  PairProducts(float* scratch, int padded, int dim)
      : padded_(padded), dim_(dim), width_(int(round_up(dim, kRowAlign))), query_(scratch),
        values_(scratch + int64_t(dim) / 2 * padded) {}

  static float factor_of(float scale) { return Pairs::factor_of(scale); }

  void query_rows(int row, const bf16* const* q, float scale) {
    Pairs::query_rows(q, dim_, scale, dim_ / 2, padded_, query_ + row);
  }

  void scores(const bf16* k, int64_t stride, int keys, float* out, const bf16* ahead) {
    // Strides are in words; an odd one (keys may lie anywhere) is staged through the value buffer.
    if (stride % 2 != 0) {
      for (int j = 0; j < keys; ++j)
        memcpy(reinterpret_cast<bf16*>(values_) + j * width_, k + j * stride, sizeof(bf16) * dim_);
      k = reinterpret_cast<const bf16*>(values_), stride = width_;
    }
    const int64_t ahead_bytes = stride == dim_ ? keys * dim_ * int64_t(sizeof(bf16)) : 0;
    multiply_all<PairWords>(
        {k, query_, stride / 2, 1, padded_, dim_ / 2, out, padded_, nullptr, ahead, ahead_bytes}, keys,
        padded_ / kLanes);
  }

  void values(float* weights, const bf16* v, int64_t stride, int keys, int rows, const float* decay, float* sums,
              const bf16* ahead) {
    const int pairs = (keys + 1) / 2;
    Pairs::values(v, stride, keys, pairs, dim_, width_, values_);
    for (int r = 0; r < padded_; r += kLanes)
      for (int j = 0; j < pairs; ++j) {  // in place: pair j is written after keys 2j and 2j + 1 were read
        const float* even = weights + int64_t(2 * j) * padded_ + r;
        const Floats odd = 2 * j + 1 < keys ? load(even + padded_) : splat(0);
        store(weights + int64_t(j) * padded_ + r, Pairs::weights(load(even), odd));
      }
    const int64_t ahead_bytes = stride == dim_ ? keys * dim_ * int64_t(sizeof(bf16)) : 0;
    multiply_all<PairWords>({weights, values_, 1, padded_, width_, pairs, sums, width_, decay, ahead, ahead_bytes},
                            rows, width_ / kLanes);
  }

 private:
  int padded_, dim_, width_;
  float *query_, *values_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
