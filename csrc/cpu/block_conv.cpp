#include "cpu/cpu.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

template <class T>
void run(const BlockConvParams& p) {
  const int64_t group_size = p.channels / p.groups;
  const T* base = static_cast<const T*>(p.base);
#pragma omp parallel for collapse(2) if (int64_t(p.batch) * p.slots * p.channels > 1 << 16)
  for (int b = 0; b < p.batch; ++b) {
    for (int i = 0; i < p.slots; ++i) {
      const T* x = static_cast<const T*>(p.x) + b * p.x_stride[0] + i * p.x_stride[1];
      const T* delta = static_cast<const T*>(p.delta) + b * p.delta_stride[0] + i * p.delta_stride[1];
      T* y = static_cast<T*>(p.y) + (int64_t(b) * p.slots + i) * p.channels;
      const int taps = i + 1 < p.taps ? i + 1 : p.taps;
      for (int g = 0; g < p.groups; ++g) {
        const int64_t first = g * group_size;
        for (int64_t c = first; c < first + group_size; ++c) {
          float sum = 0;
          for (int t = 0; t < taps; ++t)
            sum += (to_float(base[t * p.channels + c]) + to_float(delta[t * p.delta_stride[2] + g])) *
                   to_float(x[c - t * p.x_stride[1]]);
          y[c] = from_float<T>(sum);
        }
      }
    }
  }
}

}  // namespace

void block_conv(const BlockConvParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
