// Element by element. torch's own functions take other code for what is left behind whole vectors, so that a value's
// bits would depend on how many there are beside it.
#include "cpu/crew.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

template <class T>
PYDFLASH_FN Floats rounded(Floats x) {
  T values[kLanes];
  store(values, x);
  return load(values);
}

PYDFLASH_FN Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// 2 sigmoid(2x) - 1 loses all digits of a small x, which its series keeps.
PYDFLASH_FN Floats tanh(Floats x) {
  const Floats square = x * x;
  const Floats series = x - x * square * (1.0f / 3.0f - square * (2.0f / 15.0f - square * (17.0f / 315.0f)));
  return square < 0.01f ? series : 2.0f * sigmoid(2.0f * x) - 1.0f;
}

PYDFLASH_FN Floats gelu_tanh(Floats x) {
  return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// run(row, i, count) for each vector of each row.
template <class Run>
void each_vector(int64_t rows, int size, Run run) {
  in_shares(rows, threads_for(rows * size, 1 << 14), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) by_vectors(size, [&](int i, int count) { run(row, i, count); });
  });
}

template <class T, class Act>
void gate_rows(const ApplyGateParams& p, Act act) {
  each_vector(p.rows, p.size, [&](int64_t row, int i, int count) {
    const Floats gate = load_some(static_cast<const T*>(p.gate) + row * p.gate_stride + i, count);
    const Floats x = load_some(static_cast<const T*>(p.x) + row * p.x_stride + i, count);
    store_some(static_cast<T*>(p.out) + row * p.size + i, x * rounded<T>(act(gate)), count);
  });
}

template <class T>
void cap_rows(const SoftCapParams& p) {
  each_vector(p.rows, p.size, [&](int64_t row, int i, int count) {
    const Floats x = load_some(static_cast<const T*>(p.x) + row * p.x_stride + i, count);
    const Floats y = rounded<T>(tanh(rounded<T>(x / p.cap)));
    store_some(static_cast<T*>(p.out) + row * p.size + i, y * p.cap, count);
  });
}

}  // namespace

void apply_gate(const ApplyGateParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.activation == Activation::sigmoid)
      gate_rows<T>(p, [](Floats x) { return sigmoid(x); });
    else
      gate_rows<T>(p, [](Floats x) { return gelu_tanh(x); });
  });
}

void soft_cap(const SoftCapParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { cap_rows<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
