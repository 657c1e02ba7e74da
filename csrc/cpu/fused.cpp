// The steps of a decoder that plain torch would take in several calls each; see kernels.h.
#include <algorithm>

#include "cpu/crew.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kMostDim = 256;  // of a head
constexpr int64_t kParallel = 1 << 14;  // numbers: about 15 us on one core

// Calls run(i) for each of so many items of `size` numbers.
template <class Run>
void each_of(int64_t items, int64_t size, Run run) {
  in_shares(items, threads_for(items * size, kParallel), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

template <class T>
PYDFLASH_FN Floats rounded(Floats x) {
  T values[kLanes];
  store(values, x);
  return load(values);
}

// weight may be absent only for a caller that never comes here.
template <class T>
struct Norm {
  const T* weight;
  float eps, weight_offset;
  bool round_first;

  // x [size], whose squares sum up to `squares`, to out, which may be x.
  template <class In>
  PYDFLASH_FN void operator()(const In* x, Floats squares, int size, In* out) const {
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps);
    by_vectors(size, [&](int i, int count) {
      Floats y = load_some(x + i, count) * scale;
      if (round_first) y = rounded<T>(y);
      store_some(out + i, rounded<T>(y * (load_some(weight + i, count) + weight_offset)), count);
    });
  }
};

template <class T>
void norm_rows(const AddRmsNormParams& p) {
  const Norm<T> norm{static_cast<const T*>(p.weight), p.eps, p.weight_offset, p.round_first};
  each_of(p.rows, p.size, [&](int64_t row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    Floats squares{};
    if (p.delta != nullptr) {
      const T* delta = static_cast<const T*>(p.delta) + row * p.delta_stride;
      T* sum = static_cast<T*>(p.sum) + int64_t(row) * p.size;
      by_vectors(p.size, [&](int i, int count) {
        const Floats total = rounded<T>(load_some(x + i, count) + load_some(delta + i, count));
        store_some(sum + i, total, count);
        squares += total * total;
      });
      x = sum;
    } else {
      by_vectors(p.size, [&](int i, int count) {
        const Floats value = load_some(x + i, count);
        squares += value * value;
      });
    }
    norm(x, squares, p.size, static_cast<T*>(p.out) + row * p.out_stride);
  });
}

template <class T>
void swiglu_rows(const SwigluParams& p) {
  each_of(p.rows, p.size, [&](int64_t row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    by_vectors(p.size, [&](int i, int count) {
      const Floats gate = load_some(x + i, count);
      const Floats silu = rounded<T>(gate / (1.0f + exp(-gate)));
      store_some(out + i, silu * load_some(x + p.size + i, count), count);
    });
  });
}

// Rotary tables, and how a head's channels pair up.
struct Rotation {
  const float *cos, *sin;
  int64_t positions;
  int rotary_dim;
  bool interleaved;

  PYDFLASH_FN void operator()(float* x, int64_t position) const {
    const int half = rotary_dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    const int64_t row = std::min(std::max<int64_t>(position, 0), positions - 1) * half;
    for (int i = 0; i < half; ++i) {
      float &a = x[i * step], &b = x[i * step + apart];
      const float c = cos[row + i], s = sin[row + i], turned = a * c - b * s;
      b = b * c + a * s, a = turned;
    }
  }
};

// One head [dim]: normalised where there is a weight, rotated, written.
template <class T>
PYDFLASH_FN void turn_head(const T* from, const Norm<T>& norm, const Rotation& rotation, int64_t position, int dim,
                           T* to) {
  float x[kMostDim + kLanes];
  Floats squares{};
  by_vectors(dim, [&](int i, int count) {
    const Floats value = load_some(from + i, count);
    squares += value * value;
    store_some(x + i, value, count);
  });
  if (norm.weight != nullptr) norm(x, squares, dim, x);
  rotation(x, position);
  by_vectors(dim, [&](int i, int count) { store_some(to + i, load_some(x + i, count), count); });
}

template <class T>
void split_heads(const HeadNormRopeParams& p) {
  const Norm<T> q_norm{static_cast<const T*>(p.q_weight), p.eps, p.weight_offset, p.round_first};
  const Norm<T> k_norm{static_cast<const T*>(p.k_weight), p.eps, p.weight_offset, p.round_first};
  const Rotation rotation{p.cos, p.sin, p.positions, p.rotary_dim, p.interleaved};
  const int heads = p.num_heads + 2 * p.num_kv_heads, dim = p.head_dim;
  each_of(int64_t(p.batch) * p.slots, int64_t(heads) * dim, [&](int64_t row) {
    const int64_t b = row / p.slots, i = row % p.slots;
    const T* from = static_cast<const T*>(p.qkv) + b * p.qkv_stride[0] + i * p.qkv_stride[1];
    const int64_t position = int64_t(p.lengths[b]) + p.depths[b * p.depths_stride + i];
    const auto at = [&](void* data, const int64_t* stride, int head) {
      return static_cast<T*>(data) + b * stride[0] + head * stride[1] + i * stride[2];
    };
    for (int h = 0; h < p.num_heads; ++h, from += dim)
      turn_head(from, q_norm, rotation, position, dim, at(p.q, p.q_stride, h));
    for (int h = 0; h < p.num_kv_heads; ++h, from += dim)
      turn_head(from, k_norm, rotation, position, dim, at(p.k, p.k_stride, h));
    for (int h = 0; h < p.num_kv_heads; ++h, from += dim)
      memcpy(at(p.v, p.v_stride, h), from, size_t(dim) * sizeof(T));
  });
}

template <class T>
void append_rows(const ContextAppendParams& p) {
  const Rotation rotation{p.cos, p.sin, p.positions, p.rotary_dim, p.interleaved};
  const int dim = p.head_dim, width = p.num_kv_heads * dim;
  each_of(int64_t(p.batch) * p.rows, int64_t(p.layers) * width, [&](int64_t row) {
    const int64_t b = row / p.rows, n = row % p.rows;
    const int64_t count = p.counts[b], position = int64_t(p.lengths[b]) + n;
    if (n >= count || n < count - p.capacity) return;  // of a ring only the last rows survive
    const T* from = static_cast<const T*>(p.kv) + b * p.kv_stride[0] + n * p.kv_stride[1];
    for (int layer = 0; layer < p.layers; ++layer) {
      const T* weight = p.k_weights == nullptr ? nullptr : static_cast<const T*>(p.k_weights) + int64_t(layer) * dim;
      const Norm<T> norm{weight, p.eps, p.weight_offset, p.round_first};
      const auto at = [&](void* data, const int64_t* stride, int head) {
        return static_cast<T*>(data) + layer * stride[0] + b * stride[1] + head * stride[2] +
               position % p.capacity * stride[3];
      };
      for (int h = 0; h < p.num_kv_heads; ++h, from += dim)
        turn_head(from, norm, rotation, position, dim, at(p.k_cache, p.k_cache_stride, h));
      for (int h = 0; h < p.num_kv_heads; ++h, from += dim)
        memcpy(at(p.v_cache, p.v_cache_stride, h), from, size_t(dim) * sizeof(T));
    }
  });
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { norm_rows<decltype(type)>(p); });
}

void swiglu(const SwigluParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { swiglu_rows<decltype(type)>(p); });
}

void head_norm_rope(const HeadNormRopeParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { split_heads<decltype(type)>(p); });
}

void context_append(const ContextAppendParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { append_rows<decltype(type)>(p); });
}

void round_commit(const RoundCommitParams& p, Stream) {
  for (int b = 0; b < p.batch; ++b) {
    const int32_t* index = p.index + int64_t(b) * p.slots;
    const int64_t* tokens = p.tokens + int64_t(b) * p.slots;
    int64_t* record = p.record + int64_t(b) * (p.slots + 1);
    const int count = p.active[b] != 0 ? p.num_accepted[b] + 1 : 0;
    for (int n = 0; n < p.slots; ++n)
      record[n] = n >= count ? -1 : n + 1 == count ? p.bonus[b] : tokens[std::max(index[n + 1], 0)];
    record[p.slots] = count;
    if (p.features_in != nullptr) {
      const int64_t bytes = int64_t(p.features) * p.element_size;
      for (int n = 0; n < count; ++n)
        memcpy(static_cast<char*>(p.features_out) + (int64_t(b) * p.slots + n) * bytes,
               static_cast<const char*>(p.features_in) +
                   (b * p.features_stride[0] + std::max(index[n], 0) * p.features_stride[1]) * p.element_size,
               size_t(bytes));
    }
    if (count > 0) p.anchors[b] = p.bonus[b];
    p.lengths[b] += count, p.starts[b] += count, p.counts[b] = count;
  }
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
