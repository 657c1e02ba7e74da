#include <algorithm>

#include "cpu/crew.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// The rows that a slot's taps meet, the slot itself first.
template <class T>
void path_of(const ShortConvParams& p, int64_t b, int i, const T** rows) {
  const T* x = static_cast<const T*>(p.x) + b * p.x_stride[0];
  const T* tail = static_cast<const T*>(p.tail) + b * p.tail_stride[0];
  uint64_t before = 0;
  if (p.visibility != nullptr)
    before = uint64_t(p.visibility[b * p.visibility_stride + i]) & ((uint64_t(1) << i) - 1);
  rows[0] = x + i * p.x_stride[1];
  int row = p.taps - 2;  // of the tail
  for (int t = 1; t < p.taps; ++t) {
    int parent = -1;
    if (p.visibility == nullptr) {
      parent = i - t;
    } else if (before != 0) {
      parent = 63 - __builtin_clzll(before);
      before &= ~(uint64_t(1) << parent);
    }
    rows[t] = parent >= 0 ? x + parent * p.x_stride[1] : tail + row-- * p.tail_stride[1];
  }
}

template <class T>
void run(const ShortConvParams& p) {
  const T *weight = static_cast<const T*>(p.weight), *bias = static_cast<const T*>(p.bias);
  const int64_t items = int64_t(p.batch) * p.slots;
  in_shares(items, threads_for(items * p.channels, 1 << 14), [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const T* rows[8];
      path_of(p, at / p.slots, int(at % p.slots), rows);
      T* out = static_cast<T*>(p.out) + at * p.channels;
      if (p.block_x != nullptr)
        memcpy(static_cast<T*>(p.block_x) + at / p.slots * p.block_x_stride[0] + at % p.slots * p.block_x_stride[1],
               rows[0], size_t(p.channels) * sizeof(T));
      by_vectors(p.channels, [&](int c, int count) {
        Floats sum = bias == nullptr ? Floats{} : load_some(bias + c, count);
        for (int t = 0; t < p.taps; ++t)
          sum += load_some(weight + int64_t(t) * p.channels + c, count) * load_some(rows[t] + c, count);
        T values[kLanes];
        store(values, sum);
        const Floats x = load(values);
        store_some(out + c, x / (1.0f + exp(-x)), count);
      });
    }
  });
}

template <class T>
void norm(const GatedRmsNormParams& p) {
  const int64_t items = int64_t(p.rows) * p.heads;
  const T* weight = static_cast<const T*>(p.weight);
  const auto rounded = [](Floats x) {
    T values[kLanes];
    store(values, x);
    return load(values);
  };
  in_shares(items, threads_for(items * p.size, 1 << 14), [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const T* x = static_cast<const T*>(p.x) + at * p.size;
      const T* gate = static_cast<const T*>(p.gate) + at / p.heads * p.gate_stride + at % p.heads * p.size;
      T* out = static_cast<T*>(p.out) + at * p.size;
      Floats squares{};
      by_vectors(p.size, [&](int i, int count) {
        const Floats value = load_some(x + i, count);
        squares += value * value;
      });
      const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(p.size) + p.eps);
      by_vectors(p.size, [&](int i, int count) {
        const Floats y = rounded(rounded(load_some(x + i, count) * scale) * load_some(weight + i, count));
        const Floats z = load_some(gate + i, count);
        store_some(out + i, y * (z / (1.0f + exp(-z))), count);
      });
    }
  });
}

void keep(const DeltaCommitParams& p, int64_t layer, int64_t b, const int32_t* index, int count) {
  const auto copy = [&](const float* block, const int64_t* from, float* kept, const int64_t* to, int64_t size) {
    for (int n = 0; n < count; ++n)
      memcpy(kept + layer * to[0] + b * to[1] + n * to[2], block + layer * from[0] + b * from[1] + index[n] * from[2],
             size_t(size) * sizeof(float));
  };
  copy(p.block_k, p.block_k_stride, p.kept_k, p.kept_k_stride, p.k_size);
  copy(p.block_u, p.block_u_stride, p.kept_u, p.kept_u_stride, p.u_size);
  copy(p.block_g, p.block_g_stride, p.kept_g, p.kept_g_stride, p.g_size);
}

// Rows from the front on, each of which lies behind what it is made of or in the block. Strides are in bytes.
void move_tail(const DeltaCommitParams& p, int64_t layer, int64_t b, const int32_t* index, int count) {
  char* tail = static_cast<char*>(p.tail) + layer * p.tail_stride[0] + b * p.tail_stride[1];
  const char* block = static_cast<const char*>(p.block_x) + layer * p.block_x_stride[0] + b * p.block_x_stride[1];
  for (int r = 0; r < p.tail_rows && count > 0; ++r) {
    const int from = r + count - p.tail_rows;  // of the accepted slots; negative: of the tail itself
    memcpy(tail + r * p.tail_stride[2],
           from < 0 ? tail + (r + count) * p.tail_stride[2] : block + index[from] * p.block_x_stride[2],
           size_t(p.x_bytes));
  }
}

}  // namespace

void short_conv(const ShortConvParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

void gated_rms_norm(const GatedRmsNormParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { norm<decltype(type)>(p); });
}

void delta_commit(const DeltaCommitParams& p, Stream) {
  const int64_t items = int64_t(p.layers) * p.batch;
  in_shares(items, threads_for(items * p.entries * (p.k_size + p.u_size), 1 << 18), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t layer = i / p.batch, b = i % p.batch;
      const int32_t* index = p.index + b * p.entries;
      int count = 0;
      while (count < p.entries && index[count] >= 0) ++count;
      keep(p, layer, b, index, count);
      move_tail(p, layer, b, index, count);
      if (layer == 0) p.kept_count[b] = count;
    }
  });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
