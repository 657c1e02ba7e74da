// The rows of x made ready for a panel of 32 outputs, and their products with it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/vector.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kPanel = 32;      // outputs
constexpr int kStepWords = 16;  // words of 4 bytes that one output has in a step
constexpr int kStepBytes = kPanel * kStepWords * 4;
constexpr int kBlockRows = 32;               // rows of x whose sums are made at a time
constexpr int kAheadBytes = 4 * kStepBytes;  // fetched ahead; on one core of a Xeon up to twice as fast as without

// A row in 8 bits: whole numbers up to 127 by its largest magnitude. Returns the scale; NaN where it is not finite.
template <class T>
PYDFLASH_FN float quantize_row(const T* x, int size, int padded, int8_t* to) {
  Floats top{}, bad{};
  by_vectors(size, [&](int i, int count) {
    const Floats value = load_some(x + i, count);
    top = max(bit_cast<Floats>(bit_cast<Ints>(value) & 0x7fffffff), top);
    bad += value - value;
  });
  const float largest = std::max(max_lanes(top), 1e-30f);
  const float fault = sum_lanes(bad);  // 0, or NaN
  if (fault != fault) {
    memset(to, 0, size_t(padded));
    return fault;
  }
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  by_vectors(size, [&](int i, int count) {
    // Divided, which no level fuses with the rounding: ties are frequent where inputs have few bits.
    const Floats whole = round_to_integer(load_some(x + i, count) * 127.0f / largest);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Ints), Bytes);
    memcpy(to + i, &bytes, size_t(count));
  });
  memset(to + size, 0, size_t(padded - size));
  return largest / 127.0f;
}

// Lane by lane the sum of the products of two pairs of 16-bit numbers.
PYDFLASH_FN Ints pair_products(Ints a, Ints b) {
#if defined(__AVX512BW__)
  return bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(a), bit_cast<__m256i>(b)));
#elif defined(__SSE2__)
  return bit_cast<Ints>(_mm_madd_epi16(bit_cast<__m128i>(a), bit_cast<__m128i>(b)));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// What a kind of weight does with one vector of words. A row is staged as kStaged values of 4 bytes for each word.
struct FloatWords {
  using Sum = float;
  using Sums = Floats;
  using Staged = float;
  static constexpr int kInputs = 1, kStaged = 1;

  template <class T>
  static float stage(const T* x, int size, int words, Staged* to) {
    memcpy(to, x, size_t(size) * sizeof(float));
    for (int i = size; i < words; ++i) to[i] = 0;
    return 1;
  }

  Floats values;
  explicit PYDFLASH_FN FloatWords(Ints words) : values(bit_cast<Floats>(words)) {}
  PYDFLASH_FN void add(Sums& sums, const Staged* x) const { sums += values * x[0]; }
};

struct BFloatWords {
  using Sum = float;
  using Sums = Floats;
  using Staged = float;
  static constexpr int kInputs = 2, kStaged = 2;

  template <class T>
  static float stage(const T* x, int size, int words, Staged* to) {
    by_vectors(size, [&](int i, int count) { store_some(to + i, load_some(x + i, count), count); });
    for (int i = size; i < 2 * words; ++i) to[i] = 0;
    return 1;
  }

  Floats first, second;
  explicit PYDFLASH_FN BFloatWords(Ints words)
      : first(bit_cast<Floats>(words << 16)), second(bit_cast<Floats>(words & -65536)) {}
  PYDFLASH_FN void add(Sums& sums, const Staged* x) const {
    sums += first * x[0];
    sums += second * x[1];
  }
};

struct Int8Words {
  using Sum = int32_t;
  using Sums = Ints;
  using Staged = int32_t;  // inputs 0 and 2 of a word, then 1 and 3, 16 bits each
  static constexpr int kInputs = 4, kStaged = 2;

  template <class T>
  static float stage(const T* x, int size, int words, Staged* to) {
    // In the second half of the row: what is written never passes what is read.
    int8_t* bytes = reinterpret_cast<int8_t*>(to + words);
    const float scale = quantize_row(x, size, 4 * words, bytes);
    for (int w = 0; w < words; ++w) {
      int8_t word[4];
      memcpy(word, bytes + 4 * w, 4);
      to[2 * w] = int32_t(uint16_t(word[0]) | uint32_t(word[2]) << 16);
      to[2 * w + 1] = int32_t(uint16_t(word[1]) | uint32_t(word[3]) << 16);
    }
    return scale;
  }

  Ints even, odd;
  explicit PYDFLASH_FN Int8Words(Ints words) {
    typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));
    const Shorts pairs = bit_cast<Shorts>(words);
    even = bit_cast<Ints>(Shorts(Shorts(pairs << 8) >> 8)), odd = bit_cast<Ints>(Shorts(pairs >> 8));
  }
  PYDFLASH_FN void add(Sums& sums, const Staged* x) const {
    sums += pair_products(even, x[0] - Ints{}) + pair_products(odd, x[1] - Ints{});
  }
};

// Products in vector registers.
template <class Words>
class VectorProducts {
 public:
  using Sum = typename Words::Sum;
  static constexpr int kInputs = Words::kInputs;

  static int64_t padded(int64_t rows) { return rows; }
  static int64_t staged_bytes(int words) { return int64_t(words) * 4 * Words::kStaged; }
  template <class T>
  static const char* in_place(const PackedLinearParams& p) {
    const bool fits = std::is_same_v<Words, FloatWords> && p.in_features % kStepWords == 0;
    return fits ? static_cast<const char*>(p.x) : nullptr;
  }
  template <class T>
  static float stage(const T* x, int size, int words, char* to) {
    return Words::stage(x, size, words, reinterpret_cast<typename Words::Staged*>(to));
  }

  VectorProducts(int, int steps) : steps_(steps) {}

  void operator()(const char* x, int64_t stride, const char* weight, int rows, Sum (*sums)[kPanel]) const {
    int r = 0;
    for (; r + kRows <= rows; r += kRows) multiply<kRows>(x + r * stride, stride, weight, sums + r);
    if constexpr (kRows > 2)
      for (; r + 2 <= rows; r += 2) multiply<2>(x + r * stride, stride, weight, sums + r);
    for (; r < rows; ++r) multiply<1>(x + r * stride, stride, weight, sums + r);
  }

 private:
  static constexpr int kVectors = kPanel / kLanes;
  static constexpr int kRows = kLanes == 16 ? 8 : kLanes == 8 ? 2 : 1;  // 8 or 16 sums in registers

  template <int R>
  void multiply(const char* x, int64_t stride, const char* weight, Sum (*sums)[kPanel]) const {
    typename Words::Sums held[R][kVectors] = {};
    for (int s = 0; s < steps_; ++s, weight += kStepBytes, x += 4 * Words::kStaged * kStepWords)
      for (int w = 0; w < kStepWords; ++w) {
        __builtin_prefetch(weight + kAheadBytes + 128 * w);
        __builtin_prefetch(weight + kAheadBytes + 128 * w + 64);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const int output = v * kLanes;  // a step has the words of outputs 0 to 15, then those of 16 to 31
          const Words words(load_raw<Ints>(weight + (output / 16 * kStepWords + w) * 64 + output % 16 * 4));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            words.add(held[r][v], reinterpret_cast<const typename Words::Staged*>(x + r * stride) + Words::kStaged * w);
        }
      }
    for (int r = 0; r < R; ++r) memcpy(sums[r], held[r], sizeof(held[r]));
  }

  int steps_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
