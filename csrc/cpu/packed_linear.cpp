// A linear layer at the speed of its weight's bytes. A panel's products run over all rows before the next panel is
// read, and each row's over its inputs in one order: results depend neither on the other rows nor on threads.
#include <algorithm>
#include <type_traits>

#include "cpu/crew.h"
#include "cpu/kept.h"

#if defined(__AMX_BF16__)
#include "cpu/linear_tiles.h"
#else
#include "cpu/linear_rows.h"
#endif

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int64_t kParallelBytes = 96 << 10;  // of a weight: about 10 us on one core
constexpr int64_t kParallelStaged = 1 << 16;  // numbers of x

// One row's sums of a panel to the output.
template <class T, class Sums>
PYDFLASH_FN void write_row(const PackedLinearParams& p, const Sums* sums, float row_scale, int64_t output, int row) {
  T* out = static_cast<T*>(p.out) + row * p.out_stride + output;
  const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + output;
  by_vectors(int(std::min<int64_t>(kPanel, p.out_features - output)), [&](int i, int count) {
    Floats y;
    if constexpr (std::is_same_v<Sums, float>)
      y = load(sums + i);
    else
      y = __builtin_convertvector(load_raw<Ints>(sums + i), Floats) * row_scale *
          load_some(p.scales + output + i, count);
    store_some(out + i, bias == nullptr ? y : y + load_some(bias + i, count), count);
  });
}

template <class T, class Products>
void run(const PackedLinearParams& p) {
  static thread_local KeptMemory kept;
  const int words = p.steps * kStepWords;
  const int64_t padded = Products::padded(p.rows);
  const char* x = Products::template in_place<T>(p);
  int64_t stride = p.x_stride * int64_t(sizeof(T));
  float* row_scales = nullptr;
  char* staged = nullptr;
  if (x == nullptr) {
    stride = Products::staged_bytes(words);
    staged = kept.reserve(size_t(padded * (stride + int64_t(sizeof(float)))));
    row_scales = reinterpret_cast<float*>(staged + padded * stride);
    x = staged;
  }
  const int threads = threads_for(p.panels * int64_t(p.steps) * kStepBytes, kParallelBytes);
  if (staged != nullptr)
    in_shares(padded, threads_for(p.rows * int64_t(p.in_features), kParallelStaged),
              [&](int64_t begin, int64_t end, int) {
                for (int64_t row = begin; row < end; ++row) {
                  char* to = staged + row * stride;
                  if (row < p.rows)
                    row_scales[row] =
                        Products::stage(static_cast<const T*>(p.x) + row * p.x_stride, p.in_features, words, to);
                  else
                    memset(to, 0, size_t(stride));
                }
              });
  in_shares(p.panels, threads, [&](int64_t begin, int64_t end, int) {
    const Products products(p.rows, p.steps);
    alignas(64) typename Products::Sum sums[kBlockRows][kPanel];
    for (int64_t panel = begin; panel < end; ++panel) {
      const char* weight = static_cast<const char*>(p.weight) + panel * p.steps * kStepBytes;
      for (int first = 0; first < p.rows; first += kBlockRows) {
        const int rows = std::min(kBlockRows, p.rows - first);
        products(x + first * stride, stride, weight, rows, sums);
        for (int r = 0; r < rows; ++r)
          write_row<T>(p, sums[r], row_scales == nullptr ? 1 : row_scales[first + r], panel * kPanel, first + r);
      }
    }
  });
}

#if defined(__AMX_BF16__)
using Half = TileProducts<bf16>;
using Whole = TileProducts<int8_t>;
#else
using Half = VectorProducts<BFloatWords>;
using Whole = VectorProducts<Int8Words>;
#endif

}  // namespace

#if defined(__AMX_BF16__)
}  // namespace PYDFLASH_LEVEL
namespace pydflash::cpu::avx512 {
void packed_linear(const PackedLinearParams& p, Stream stream);
}
namespace pydflash::cpu::PYDFLASH_LEVEL {
#endif

void packed_linear(const PackedLinearParams& p, [[maybe_unused]] Stream stream) {
  switch (p.format) {
    case WeightFormat::int8:
      return by_dtype(p.dtype, [&](auto type) { run<decltype(type), Whole>(p); });
    case WeightFormat::bf16:
      return run<bf16, Half>(p);
    case WeightFormat::f32:
#if defined(__AMX_BF16__)
      return avx512::packed_linear(p, stream);  // tiles have no float
#else
      return run<float, VectorProducts<FloatWords> >(p);
#endif
  }
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
