// Attention products on vector units, over 32-bit words: a word is one float, or (with VDPBF16PS) a pair of bf16.
// Keys and weights are broadcast word by word, query rows and value columns are lanes; nothing is summed across
// lanes, and keys and values that need no conversion are read where they lie.
#pragma once

#include "cpu/attention_rows.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// Register tile: up to kVectors vectors of lanes times kSingles broadcast words; as many sums as hide the latency.
constexpr int kVectors = kLanes == 16 ? 4 : 2;
template <int N>
constexpr int kSingles = N == kVectors || N > 2 ? 6 : 12;

// out[m][n] = decay[m] * out[m][n] + sum over steps of single[m] * lanes[n]; decay null = from zero.
struct Product {
  const void *single, *lanes;
  int64_t single_row, single_step, lanes_step;  // in words
  int steps;
  float* out;
  int64_t out_row;
  const float* decay;
  // Memory wanted next is fetched evenly over the steps: 17.9 ms instead of 23.2 at 64 rows x 8192 keys x 128, 8 heads.
  const void* ahead;
  int64_t ahead_bytes;
};

struct FloatWords {
  static PYDFLASH_FN Floats dot(Floats sum, const int32_t* single, const int32_t* lanes) {
    return multiply_add(splat(load_raw<float>(single)), load_raw<Floats>(lanes), sum);
  }
};

template <class Words, int M, int N>
const char* multiply(const Product& p, const int32_t* single, const int32_t* lanes, float* out, const float* decay,
                     const char* ahead) {
  Floats sum[M][N];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[m][n] = decay == nullptr ? splat(0) : load(out + m * p.out_row + n * kLanes) * splat(decay[m]);
  for (int s = 0; s < p.steps; ++s, single += p.single_step, lanes += p.lanes_step, ahead += p.ahead_bytes) {
    __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        sum[m][n] = Words::dot(sum[m][n], single + m * p.single_row, lanes + n * kLanes);
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(out + m * p.out_row + n * kLanes, sum[m][n]);
  return ahead;
}

// The last, smaller register tile of a column.
template <class Words, int N, int M, class... Rest>
PYDFLASH_FN const char* multiply_rest(int singles, Rest... rest) {
  if (singles == M) return multiply<Words, M, N>(rest...);
  if constexpr (M > 1) return multiply_rest<Words, N, M - 1>(singles, rest...);
  __builtin_unreachable();
}

// N vectors of the output, for all `singles`.
template <class Words, int N>
const char* multiply_column(const Product& p, int column, int singles, const char* ahead) {
  constexpr int M = kSingles<N>;
  const int32_t* lanes = static_cast<const int32_t*>(p.lanes) + column * kLanes;
  for (int m = 0; m < singles; m += M) {
    const int32_t* single = static_cast<const int32_t*>(p.single) + m * p.single_row;
    float* out = p.out + m * p.out_row + column * kLanes;
    const float* decay = p.decay == nullptr ? nullptr : p.decay + m;
    ahead = singles - m >= M ? multiply<Words, M, N>(p, single, lanes, out, decay, ahead)
                             : multiply_rest<Words, N, M - 1, const Product&>(singles - m, p, single, lanes, out,
                                                                              decay, ahead);
  }
  return ahead;
}

// All `singles` x `vectors` of the output.
template <class Words>
void multiply_all(Product p, int singles, int vectors) {
  const int64_t calls = int64_t((singles + 5) / 6) * ((vectors + kVectors - 1) / kVectors);
  p.ahead_bytes = (p.ahead_bytes + calls * p.steps - 1) / (calls * p.steps);
  const char* ahead = static_cast<const char*>(p.ahead);
  for (int n = 0; n < vectors; n += kVectors) {
    const int count = vectors - n < kVectors ? vectors - n : kVectors;
    if (count == kVectors) ahead = multiply_column<Words, kVectors>(p, n, singles, ahead);
    if (count == 1) ahead = multiply_column<Words, 1>(p, n, singles, ahead);
    if constexpr (kVectors > 2) {
      if (count == 2) ahead = multiply_column<Words, 2>(p, n, singles, ahead);
      if (count == 3) ahead = multiply_column<Words, 3>(p, n, singles, ahead);
    }
  }
}

// Products in float for every storage type; narrow ones are widened tile by tile.
template <class T>
class FloatProducts {
 public:
  using Type = T;
  static constexpr int kKeys = 96;  // per tile: with 64 rows, weights and 64 value columns fit the L1 cache
  static constexpr int kGroup = 1;  // keys whose products are summed together: a key's place in them counts

  static int64_t scratch_floats(int padded, int dim) {
    return int64_t(dim) * padded + 2 * kKeys * round_up(dim, kRowAlign);
  }

  FloatProducts(float* scratch, int padded, int dim)
      : padded_(padded), dim_(dim), width_(int(round_up(dim, kRowAlign))), query_(scratch),
        keys_(scratch + int64_t(dim) * padded), values_(keys_ + kKeys * width_) {}

  // What the scores still have to be multiplied with.
  static float factor_of(float) { return 1; }

  // kLanes rows of the query from `row` on, scaled, as [dim][row].
  void query_rows(int row, const T* const* q, float scale) {
    for (int d = 0; d < dim_; d += kLanes) {
      Floats tile[kLanes];
      for (int i = 0; i < kLanes; ++i) tile[i] = load_row(q[i] + d, dim_ - d) * scale;
      transpose(tile);
      for (int i = 0; i < kLanes && d + i < dim_; ++i) store(query_ + int64_t(d + i) * padded_ + row, tile[i]);
    }
  }

  // out[key][row] = key . row; `ahead` is wanted next, `keys` rows of it.
  void scores(const T* k, int64_t stride, int keys, float* out, const T* ahead) {
    const int64_t ahead_bytes = stride == dim_ ? keys * dim_ * int64_t(sizeof(T)) : 0;
    const float* words = floats(k, stride, keys, keys_, dim_);
    multiply_all<FloatWords>({words, query_, stride, 1, padded_, dim_, out, padded_, nullptr, ahead, ahead_bytes}, keys,
                             padded_ / kLanes);
  }

  // sums[row] = decay[row] * sums[row] + sum over keys of weights[key][row] * v[key].
  void values(const float* weights, const T* v, int64_t stride, int keys, int rows, const float* decay, float* sums,
              const T* ahead) {
    const int64_t ahead_bytes = stride == dim_ ? keys * dim_ * int64_t(sizeof(T)) : 0;
    const float* words = floats(v, stride, keys, values_, int(round_up(dim_, kLanes)));
    multiply_all<FloatWords>({weights, words, 1, padded_, stride, keys, sums, width_, decay, ahead, ahead_bytes}, rows,
                             int(round_up(dim_, kLanes)) / kLanes);
  }

 private:
  // The rows as floats, at least `width` wide: where they lie if they are that already, else copied to `to`.
  const float* floats(const T* from, int64_t& stride, int rows, float* to, int width) const {
    if constexpr (sizeof(T) == sizeof(float))
      if (width == dim_) return reinterpret_cast<const float*>(from);
    for (int j = 0; j < rows; ++j)
      for (int d = 0; d < dim_; d += kLanes) store(to + j * width_ + d, load_row(from + j * stride + d, dim_ - d));
    stride = width_;
    return to;
  }

  int padded_, dim_, width_;
  float *query_, *keys_, *values_;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
