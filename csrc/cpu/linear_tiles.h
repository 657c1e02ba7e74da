// The same products on AMX tiles: 16 rows of x by a step, times a step of 16 outputs.
#pragma once

#include <type_traits>

#include "cpu/linear_rows.h"
#include "cpu/tiles.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

template <class Element>  // bf16 or int8_t
class TileProducts {
 public:
  static constexpr bool kWhole = std::is_same_v<Element, int8_t>;
  using Sum = std::conditional_t<kWhole, int32_t, float>;
  static constexpr int kInputs = 4 / int(sizeof(Element));

  // Up to 32 rows the tiles are as high as they are; beyond, all are full.
  static int64_t padded(int64_t rows) {
    return rows <= kBlockRows ? rows : (rows + kBlockRows - 1) / kBlockRows * kBlockRows;
  }
  static int64_t staged_bytes(int words) { return int64_t(words) * 4; }
  // Rows that tiles can read where they lie.
  template <class T>
  static const char* in_place(const PackedLinearParams& p) {
    const bool fits = std::is_same_v<T, Element> && p.in_features % (kStepWords * kInputs) == 0;
    return fits && padded(p.rows) == p.rows ? static_cast<const char*>(p.x) : nullptr;
  }
  template <class T>
  static float stage(const T* x, int size, int words, char* to) {
    if constexpr (kWhole) return quantize_row(x, size, 4 * words, reinterpret_cast<int8_t*>(to));
    memcpy(to, x, size_t(size) * sizeof(T));
    memset(to + size_t(size) * sizeof(T), 0, size_t(words) * 4 - size_t(size) * sizeof(T));
    return 1;
  }

  TileProducts(int rows, int steps)
      : steps_(steps), full_(rows > kBlockRows), scope_(rows < 16 ? rows : 16, rows <= 16 || full_ ? 16 : rows - 16) {}

  void operator()(const char* x, int64_t stride, const char* weight, int rows, Sum (*sums)[kPanel]) const {
    full_ || rows > 16 ? multiply<true>(x, stride, weight, sums) : multiply<false>(x, stride, weight, sums);
  }

 private:
  template <bool Second>
  void multiply(const char* x, int64_t stride, const char* weight, Sum (*sums)[kPanel]) const {
    constexpr int row = kPanel * 4;
    asm volatile("" ::: "memory");  // the tile intrinsics of GCC do not tell what memory they read
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Second) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int s = 0; s < steps_; ++s, x += 64, weight += kStepBytes) {
      for (int i = 0; i < kStepBytes; i += 64) __builtin_prefetch(weight + kAheadBytes + i);
      _tile_loadd(4, x, stride);
      _tile_loadd(6, weight, 64);
      _tile_loadd(7, weight + kStepBytes / 2, 64);
      if constexpr (kWhole) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (Second) {
        _tile_loadd(5, x + 16 * stride, stride);
        if constexpr (kWhole) {
          _tile_dpbssd(2, 5, 6);
          _tile_dpbssd(3, 5, 7);
        } else {
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
    char* out = reinterpret_cast<char*>(sums);
    _tile_stored(0, out, row);
    _tile_stored(1, out + 64, row);
    if constexpr (Second) {
      _tile_stored(2, out + 16 * row, row);
      _tile_stored(3, out + 16 * row + 64, row);
    }
    asm volatile("" ::: "memory");
  }

  int steps_;
  bool full_;
  TileScope scope_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
