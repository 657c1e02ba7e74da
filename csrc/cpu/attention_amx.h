// bf16 products on AMX tiles of 16 x 32 bf16. Keys are the rows of the left operand where they lie, so scores come
// out as [key][row]; the weights are turned to [row][key] tiles for the second product.
#pragma once

#include "cpu/attention_pairs.h"
#include "cpu/tiles.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// out [16 R][16 C] (+)= the sum over steps of R left tiles times C right tiles; strides and steps in bytes.
struct TileProduct {
  const char* left;
  int64_t left_stride, left_next, left_step;
  const char* right;
  int64_t right_stride, right_step;
  int steps;
  float* out;
  int64_t out_stride;
  bool add;
};

template <int R, int C>
void multiply_tiles(const TileProduct& p, const char*& ahead, int64_t ahead_bytes) {
  asm volatile("" ::: "memory");  // the tile intrinsics of GCC do not tell what memory they read
  const int64_t row = 16 * p.out_stride;
  char* out = reinterpret_cast<char*>(p.out);
  if (p.add) {
    _tile_loadd(0, out, p.out_stride);
    if constexpr (C > 1) _tile_loadd(1, out + 64, p.out_stride);
    if constexpr (R > 1) _tile_loadd(2, out + row, p.out_stride);
    if constexpr (R > 1 && C > 1) _tile_loadd(3, out + row + 64, p.out_stride);
  } else {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && C > 1) _tile_zero(3);
  }
  const char *left = p.left, *right = p.right;
  for (int s = 0; s < p.steps; ++s, left += p.left_step, right += p.right_step) {
    _tile_loadd(4, left, p.left_stride);
    _tile_loadd(6, right, p.right_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (C > 1) {
      _tile_loadd(7, right + 64, p.right_stride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, left + p.left_next, p.left_stride);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
    for (int64_t i = 0; i < ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    ahead += ahead_bytes;
  }
  _tile_stored(0, out, p.out_stride);
  if constexpr (C > 1) _tile_stored(1, out + 64, p.out_stride);
  if constexpr (R > 1) _tile_stored(2, out + row, p.out_stride);
  if constexpr (R > 1 && C > 1) _tile_stored(3, out + row + 64, p.out_stride);
  asm volatile("" ::: "memory");
}

class TileProducts {
 public:
  using Type = bf16;
  static constexpr int kKeys = 256;  // per tile: sums are loaded and stored once for so many keys
  static constexpr int kGroup = 32;

  static int64_t scratch_floats(int padded, int dim) {
    const int64_t words = round_up(dim, 32) / 2;
    return words * (padded + 32) + kKeys / 2 * (round_up(dim, kRowAlign) + padded);
  }

  TileProducts(float* scratch, int padded, int dim)
      : padded_(padded), dim_(dim), width_(int(round_up(dim, kRowAlign))), words_(int(round_up(dim, 32)) / 2),
        query_(scratch), keys_(query_ + int64_t(words_) * padded), values_(keys_ + int64_t(words_) * 32),
        weights_(values_ + int64_t(kKeys) / 2 * width_) {}

  static float factor_of(float scale) { return Pairs::factor_of(scale); }

  void query_rows(int row, const bf16* const* q, float scale) {
    Pairs::query_rows(q, dim_, scale, words_, padded_, query_ + row);
  }

  void scores(const bf16* k, int64_t stride, int keys, float* out, const bf16* ahead) {
    const int64_t ahead_bytes = stride == dim_ ? per_step(keys, (keys + 31) / 32 * (words_ / 16)) : 0;
    const char* next = reinterpret_cast<const char*>(ahead);
    for (int j = 0; j < keys; j += 32) {
      const bf16* left = k + j * stride;
      int64_t left_stride = stride;
      if (keys - j < 32 || dim_ % 32 != 0) {  // a tile would read past the keys or past head_dim
        left = stage(left, stride, keys - j < 32 ? keys - j : 32);
        left_stride = 2 * words_;
      }
      for (int r = 0; r < padded_; r += 32) {
        const TileProduct p{reinterpret_cast<const char*>(left), 2 * left_stride, 32 * left_stride, 64,
                            reinterpret_cast<const char*>(query_ + r), 4 * int64_t(padded_), 64 * int64_t(padded_),
                            words_ / 16, out + int64_t(j) * padded_ + r, 4 * int64_t(padded_), false};
        r + 16 < padded_ ? multiply_tiles<2, 2>(p, next, ahead_bytes) : multiply_tiles<2, 1>(p, next, ahead_bytes);
      }
    }
  }

  void values(const float* weights, const bf16* v, int64_t stride, int keys, int rows, const float* decay,
              float* sums, const bf16* ahead) {
    const int groups = (keys + 31) / 32;
    Pairs::values(v, stride, keys, groups * 16, dim_, width_, values_);
    for (int j = 0; j < groups; ++j)
      for (int r = 0; r < padded_; r += 16) weight_tile(weights, keys, 32 * j, r);
    for (int r = 0; r < rows; ++r)
      if (decay[r] != 1)
        for (int d = 0; d < width_; d += kLanes)
          store(sums + int64_t(r) * width_ + d, load(sums + int64_t(r) * width_ + d) * splat(decay[r]));
    const int64_t ahead_bytes = stride == dim_ ? per_step(keys, groups * ((width_ + 31) / 32)) : 0;
    const char* next = reinterpret_cast<const char*>(ahead);
    for (int r = 0; r < padded_; r += 32)
      for (int d = 0; d < width_; d += 32) {
        const TileProduct p{reinterpret_cast<const char*>(weights_ + 16 * r), 64, 1024, 64 * int64_t(padded_),
                            reinterpret_cast<const char*>(values_ + d), 4 * int64_t(width_), 64 * int64_t(width_),
                            groups, sums + int64_t(r) * width_ + d, 4 * int64_t(width_), true};
        const bool two_rows = r + 16 < padded_, two_columns = d + 16 < width_;
        if (two_rows)
          two_columns ? multiply_tiles<2, 2>(p, next, ahead_bytes) : multiply_tiles<2, 1>(p, next, ahead_bytes);
        else
          two_columns ? multiply_tiles<1, 2>(p, next, ahead_bytes) : multiply_tiles<1, 1>(p, next, ahead_bytes);
      }
  }

 private:
  // Prefetched bytes per step of a product with `steps` steps per 32 rows.
  int64_t per_step(int keys, int steps) const {
    return keys * dim_ * int64_t(sizeof(bf16)) / (steps * ((padded_ + 31) / 32)) + 1;
  }

  // 32 keys of full tile width, zero where there are none.
  const bf16* stage(const bf16* k, int64_t stride, int keys) {
    for (int j = 0; j < 32; ++j)
      for (int w = 0; w < words_; w += 16)
        _mm512_storeu_si512(keys_ + j * words_ + w, load_pairs(k + j * stride + 2 * w, j < keys ? dim_ - 2 * w : 0));
    return reinterpret_cast<const bf16*>(keys_);
  }

  // Weights of keys key .. key + 31 for 16 rows: [key][row] floats to a [row][key] tile of bf16.
  void weight_tile(const float* weights, int keys, int key, int row) {
    Floats tile[16];
    for (int j = 0; j < 16; ++j) {
      const float* at = weights + int64_t(key + 2 * j) * padded_ + row;
      const Floats even = key + 2 * j < keys ? load(at) : splat(0);
      tile[j] = Pairs::weights(even, key + 2 * j + 1 < keys ? load(at + padded_) : splat(0));
    }
    transpose(tile);
    float* to = weights_ + (int64_t(key) / 32 * (padded_ / 16) + row / 16) * 256;
    for (int i = 0; i < 16; ++i) store(to + 16 * i, tile[i]);
  }

  TileScope scope_;
  int padded_, dim_, width_, words_;
  float *query_, *keys_, *values_, *weights_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
