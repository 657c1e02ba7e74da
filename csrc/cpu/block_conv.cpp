#include "cpu/crew.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// One slot, N channels at a time; N divides the group, so a vector of channels shares its dynamic taps.
template <class T, int N>
void slot(const BlockConvParams& p, const T* x, const T* delta, int taps, T* y) {
  const int group = p.channels / p.groups;
  const T* base = static_cast<const T*>(p.base);
  for (int g = 0; g < p.groups; ++g) {
    float dynamic[8];
    for (int t = 0; t < taps; ++t) dynamic[t] = to_float(delta[t * p.delta_stride[2] + g]);
    for (int c = g * group; c < (g + 1) * group; c += N) {
      auto sum = (load<N>(base + c) + dynamic[0]) * load<N>(x + c);
      for (int t = 1; t < taps; ++t)
        sum += (load<N>(base + int64_t(t) * p.channels + c) + dynamic[t]) * load<N>(x + c - t * p.x_stride[1]);
      store<N>(y + c, sum);
    }
  }
}

// Groups no vector divides.
template <class T>
void narrow_slot(const BlockConvParams& p, const T* x, const T* delta, int taps, T* y) {
  const int group = p.channels / p.groups;
  const T* base = static_cast<const T*>(p.base);
  for (int c = 0; c < p.channels; ++c) {
    float sum = 0;
    for (int t = 0; t < taps; ++t)
      sum += (to_float(base[int64_t(t) * p.channels + c]) + to_float(delta[t * p.delta_stride[2] + c / group])) *
             to_float(x[c - t * p.x_stride[1]]);
    y[c] = from_float<T>(sum);
  }
}

template <class T>
void run(const BlockConvParams& p) {
  const int group = p.channels / p.groups;
  const auto one = group % kLanes == 0 ? slot<T, kLanes>
                   : group % 8 == 0    ? slot<T, 8>
                   : group % 4 == 0    ? slot<T, 4>
                                       : narrow_slot<T>;
  const int64_t items = int64_t(p.batch) * p.slots;
  in_shares(items, threads_for(items * p.channels, 1 << 15), [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t b = at / p.slots, i = at % p.slots;
      one(p, static_cast<const T*>(p.x) + b * p.x_stride[0] + i * p.x_stride[1],
          static_cast<const T*>(p.delta) + b * p.delta_stride[0] + i * p.delta_stride[1],
          int(i + 1 < p.taps ? i + 1 : p.taps), static_cast<T*>(p.y) + at * p.channels);
    }
  });
}

}  // namespace

void block_conv(const BlockConvParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
