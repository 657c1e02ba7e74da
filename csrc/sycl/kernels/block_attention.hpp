// Kernels of block_attention: one for a part of a context, one that merges the parts in a fixed order.
#pragma once

#include "sycl/kernels/block_attention_shape.hpp"

namespace pydflash::sycl_backend {

// The rows of one sub-group, in registers: a lane has one key of a step, then runs of four of the columns.
template <int kDim>
class AttentionRows {
 public:
  static constexpr int kRows = kDim > 128 ? 4 : 8;  // more would not fit in 128 registers
  static constexpr int kRuns = kDim / 64;
  static constexpr int kKeyStride = kDim / 4 + 1;  // in fours: lanes that read keys side by side hit other banks

  AttentionRows() {
    PYDFLASH_UNROLL
    for (int r = 0; r < kRows; ++r) {
      top_[r] = -INFINITY, total_[r] = 0;
      PYDFLASH_UNROLL
      for (int c = 0; c < kRuns; ++c) sums_[r][c] = Four(0.0f);
    }
  }

  // Bit r of `seen` says whether row r sees this lane's key.
  void step(const ::sycl::sub_group& lanes, const ::sycl::local_accessor<float, 1>& query, int first_row,
            const ::sycl::local_accessor<Four, 1>& keys, const ::sycl::local_accessor<Four, 1>& values, int head_dim,
            float factor, uint32_t seen) {
    const int lane = int(lanes.get_local_linear_id());
    float scores[kRows] = {};
    for (int d = 0; d < head_dim; d += 16) {
      float q[kRows];
      PYDFLASH_UNROLL
      for (int r = 0; r < kRows; ++r) q[r] = query[(first_row + r) * kDim + d + lane];
      PYDFLASH_UNROLL
      for (int e = 0; e < 16; e += 4) {
        const Four key = keys[lane * kKeyStride + (d + e) / 4];
        PYDFLASH_UNROLL
        for (int i = 0; i < 4; ++i)
          PYDFLASH_UNROLL
          for (int r = 0; r < kRows; ++r)
            scores[r] = ::sycl::fma(::sycl::group_broadcast(lanes, q[r], e + i), float(key[i]), scores[r]);
      }
    }
    PYDFLASH_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float score = seen >> r & 1 ? scores[r] * factor : -INFINITY;
      const float top = ::sycl::fmax(top_[r], ::sycl::reduce_over_group(lanes, score, ::sycl::maximum<float>()));
      const float from = finite_top(top), decay = ::sycl::exp2(top_[r] - from);
      scores[r] = ::sycl::exp2(score - from);
      total_[r] = total_[r] * decay + scores[r];
      top_[r] = top;
      PYDFLASH_UNROLL
      for (int c = 0; c < kRuns; ++c) sums_[r][c] *= decay;
    }
    PYDFLASH_UNROLL
    for (int k = 0; k < kStepKeys; ++k) {
      float weights[kRows];
      PYDFLASH_UNROLL
      for (int r = 0; r < kRows; ++r) weights[r] = ::sycl::group_broadcast(lanes, scores[r], k);
      PYDFLASH_UNROLL
      for (int c = 0; c < kRuns; ++c) {
        const Four value = values[k * (kDim / 4) + c * 16 + lane];
        PYDFLASH_UNROLL
        for (int r = 0; r < kRows; ++r)
          PYDFLASH_UNROLL
          for (int i = 0; i < 4; ++i)
            sums_[r][c][i] = ::sycl::fma(weights[r], float(value[i]), float(sums_[r][c][i]));
      }
    }
  }

  // Calls put(r, column, four columns of the sums) and then done(r, top, total) for the rows before `count`.
  template <class Put, class Done>
  void finish(const ::sycl::sub_group& lanes, int count, int head_dim, Put put, Done done) const {
    const int lane = int(lanes.get_local_linear_id());
    PYDFLASH_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float total = ::sycl::reduce_over_group(lanes, total_[r], ::sycl::plus<float>());
      if (r >= count) continue;
      done(r, top_[r], total);
      PYDFLASH_UNROLL
      for (int c = 0; c < kRuns; ++c)
        if (const int column = c * 64 + lane * 4; column < head_dim) put(r, column, total, sums_[r][c]);
    }
  }

 private:
  Four sums_[kRows][kRuns];
  float top_[kRows], total_[kRows];  // total: of this lane's keys
};

// A work-group has a tile of rows of a KV head, and every splits-th step of the context; the last split has the block
// as well. kDim: head_dim rounded up to 64, 128 or 256. All becomes float in local memory; unseen rows become zeros,
// whatever they held.
// RTC attention_f32_64: BlockAttention<float, 64>
// RTC attention_f32_128: BlockAttention<float, 128>
// RTC attention_f32_256: BlockAttention<float, 256>
// RTC attention_bf16_64: BlockAttention<bfloat, 64>
// RTC attention_bf16_128: BlockAttention<bfloat, 128>
// RTC attention_bf16_256: BlockAttention<bfloat, 256>
// RTC attention_f16_64: BlockAttention<half, 64>
// RTC attention_f16_128: BlockAttention<half, 128>
// RTC attention_f16_256: BlockAttention<half, 256>
template <class T, int kDim>
struct BlockAttention {
  using Rows = AttentionRows<kDim>;

  AttentionShape shape;
  const T *q, *k_cache, *v_cache, *k_block, *v_block;
  T* out;
  const int32_t* lengths;
  const int64_t* visibility;
  const int32_t* depths;
  float *sums, *stats;  // [batch, KV head, split, row, head_dim] and [.., 2]: largest scaled score, sum of weights
  ::sycl::local_accessor<float, 1> query;     // [tile_rows, kDim]
  ::sycl::local_accessor<Four, 1> keys;       // [kStepKeys, Rows::kKeyStride]
  ::sycl::local_accessor<Four, 1> values;     // [kStepKeys, kDim / 4]
  ::sycl::local_accessor<uint64_t, 1> bits;   // [slots]: what each sees of the block
  ::sycl::local_accessor<int32_t, 1> firsts;  // [slots]: and of the context

  // The place of a work-group.
  struct Place {
    int batch, kv_head, split, first_row, rows;
  };

  PYDFLASH_SUB_GROUP_OF_16 void operator()(::sycl::nd_item<1> item) const {
    const Place place = place_of(int(item.get_group_linear_id()));
    const int thread = int(item.get_local_linear_id()), threads = int(item.get_local_range(0));
    const int32_t length = lengths[place.batch];
    for (int i = thread; i < shape.slots; i += threads) {
      const int32_t* own_depths = depths + place.batch * shape.depths_stride;
      firsts[i] = first_position(shape, length, own_depths[i]);
      bits[i] = visible_slots(shape, visibility + place.batch * shape.visibility_stride, own_depths, i);
    }
    load_query(place, thread, threads);
    ::sycl::group_barrier(item.get_group());

    const ::sycl::sub_group lanes = item.get_sub_group();
    const int lane = int(lanes.get_local_linear_id());
    int32_t lowest = length;
    uint64_t any_bits = 0;
    for (int i = lane; i < shape.slots; i += 16) lowest = ::sycl::min(lowest, firsts[i]), any_bits |= bits[i];
    lowest = ::sycl::reduce_over_group(lanes, lowest, ::sycl::minimum<int32_t>());
    any_bits = ::sycl::reduce_over_group(lanes, any_bits, ::sycl::bit_or<uint64_t>());

    // Lane r knows what row r sees.
    const int own_row = int(lanes.get_group_linear_id()) * Rows::kRows, own_rows = place.rows - own_row;
    const int own_slot = (place.first_row + ::sycl::min(own_row + lane, place.rows - 1)) % shape.slots;
    const int32_t own_first = firsts[own_slot];
    const uint64_t own_bits = bits[own_slot];
    const auto rows_that = [&](auto sees) {
      uint32_t rows = 0;
      PYDFLASH_UNROLL
      for (int r = 0; r < Rows::kRows; ++r) rows |= sees(r) ? 1u << r : 0u;
      return rows;
    };

    // One loop over the steps of the context, then those of the block: the compiler sees the long body once.
    Rows rows;
    const RingSteps ring(shape.capacity, length, lowest);
    const int context_steps = ::sycl::max(0, (ring.count - place.split + shape.splits - 1) / shape.splits);
    const int block_steps = place.split == shape.splits - 1 ? (shape.slots + kStepKeys - 1) / kStepKeys : 0;
    PYDFLASH_ROLLED
    for (int n = 0; n < context_steps + block_steps; ++n) {
      const bool in_block = n >= context_steps;
      const int32_t row = in_block ? (n - context_steps) * kStepKeys : ring.row(place.split + n * shape.splits);
      load_keys(place, thread, threads, in_block ? k_block : k_cache, in_block ? shape.k_block : shape.k_cache,
                in_block ? v_block : v_cache, in_block ? shape.v_block : shape.v_cache, row, [&](int32_t i) {
                  return in_block ? (any_bits >> (i & 63) & 1) != 0 : ring.position(i) >= lowest;
                });
      ::sycl::group_barrier(item.get_group());
      const int32_t position = ring.position(row + lane);
      uint32_t seen;
      if (in_block)
        seen = rows_that([&](int r) {
          return (::sycl::group_broadcast(lanes, own_bits, r) >> ((row + lane) & 63) & 1) != 0;
        });
      else
        seen = rows_that([&](int r) { return position >= ::sycl::group_broadcast(lanes, own_first, r); });
      if (own_rows > 0) rows.step(lanes, query, own_row, keys, values, shape.head_dim, shape.factor, seen);
      ::sycl::group_barrier(item.get_group());
    }
    store(place, lanes, own_row, own_rows, rows);
  }

 private:
  Place place_of(int unit) const {
    const int tile = unit % shape.row_tiles;
    unit /= shape.row_tiles;
    Place place;
    place.split = unit % shape.splits;
    unit /= shape.splits;
    place.kv_head = unit % shape.kv_heads, place.batch = unit / shape.kv_heads;
    place.first_row = tile * shape.tile_rows;
    place.rows = ::sycl::min(shape.tile_rows, shape.group * shape.slots - place.first_row);
    return place;
  }

  // Address of a folded row in a tensor of query heads.
  template <class U>
  U* row_of(U* data, const Strides3& stride, const Place& place, int row) const {
    const int head = place.kv_head * shape.group + row / shape.slots;
    return data + place.batch * stride.a + head * stride.b + row % shape.slots * stride.c;
  }

  // Rows that do not exist and columns past head_dim become zeros; so do such columns of the keys, for all steps.
  void load_query(const Place& place, int thread, int threads) const {
    constexpr int kRun = 16 / int(sizeof(T)), kRowRuns = kDim / kRun;
    for (int i = thread; i < shape.tile_rows * kRowRuns; i += threads) {
      const int row = i / kRowRuns, column = i % kRowRuns * kRun;
      Words words(0u);
      if (row < place.rows && column < shape.head_dim)
        words = load_words(row_of(q, shape.q, place, place.first_row + row) + column, shape.aligned != 0);
      PYDFLASH_UNROLL
      for (int n = 0; n < kRun / 4; ++n) {
        const Four four = unpack<T>(words, n);
        PYDFLASH_UNROLL
        for (int e = 0; e < 4; ++e) query[row * kDim + column + 4 * n + e] = four[e];
      }
    }
    for (int i = thread; i < kStepKeys * Rows::kKeyStride; i += threads)
      if (i % Rows::kKeyStride * 4 >= shape.head_dim) keys[i] = Four(0.0f);
  }

  // Keys and values of the rows from `row` on, two loads of each on their way at a time.
  template <class Needed>
  void load_keys(const Place& place, int thread, int threads, const T* k, const Strides3& k_stride, const T* v,
                 const Strides3& v_stride, int32_t row, Needed needed) const {
    constexpr int kRun = 16 / int(sizeof(T)), kRowRuns = kDim / kRun, kTogether = 2;
    k += place.batch * k_stride.a + place.kv_head * k_stride.b;
    v += place.batch * v_stride.a + place.kv_head * v_stride.b;
    for (int first = thread; first < kStepKeys * kRowRuns; first += kTogether * threads) {
      Words key_words[kTogether], value_words[kTogether];
      PYDFLASH_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * threads, column = i % kRowRuns * kRun;
        const int64_t from = row + i / kRowRuns;
        key_words[u] = Words(0u), value_words[u] = Words(0u);
        if (i < kStepKeys * kRowRuns && column < shape.head_dim && needed(int32_t(from))) {
          key_words[u] = load_words(k + from * k_stride.c + column, shape.aligned != 0);
          value_words[u] = load_words(v + from * v_stride.c + column, shape.aligned != 0);
        }
      }
      PYDFLASH_UNROLL
      for (int u = 0; u < kTogether; ++u) {
        const int i = first + u * threads, column = i % kRowRuns * kRun, to = i / kRowRuns;
        if (i >= kStepKeys * kRowRuns) continue;
        PYDFLASH_UNROLL
        for (int n = 0; n < kRun / 4; ++n) {
          keys[to * Rows::kKeyStride + column / 4 + n] = unpack<T>(key_words[u], n);
          values[to * (kDim / 4) + column / 4 + n] = unpack<T>(value_words[u], n);
        }
      }
    }
  }

  void store(const Place& place, const ::sycl::sub_group& lanes, int own_row, int own_rows, const Rows& rows) const {
    if (own_rows <= 0) return;
    const int first = place.first_row + own_row;
    const bool whole = shape.splits == 1;
    const int64_t all = int64_t(shape.group) * shape.slots;
    const int64_t base = ((int64_t(place.batch) * shape.kv_heads + place.kv_head) * shape.splits + place.split) * all;
    rows.finish(
        lanes, own_rows, shape.head_dim,
        [&](int r, int column, float total, const Four& four) {
          if (whole)
            store_four<T>(row_of(out, shape.out, place, first + r) + column, four * (total > 0 ? 1.0f / total : 0.0f),
                          shape.aligned != 0);
          else if (total > 0)
            *reinterpret_cast<Four*>(sums + (base + first + r) * shape.head_dim + column) = four;
        },
        [&](int r, float top, float total) {
          float* stat = stats + 2 * (base + first + r);
          if (!whole && lanes.leader()) stat[0] = top, stat[1] = total;
        });
  }
};

// A work-item has four columns of a row of the output. A part without keys may hold anything.
// RTC f32: MergeAttention<float>
// RTC bf16: MergeAttention<bfloat>
// RTC f16: MergeAttention<half>
template <class T>
struct MergeAttention {
  AttentionShape shape;
  const float *sums, *stats;
  T* out;
  int64_t count;  // of work-items that have work

  void operator()(::sycl::nd_item<1> item) const {
    int64_t index = int64_t(item.get_global_linear_id());
    if (index >= count) return;
    const int quarter = shape.head_dim / 4, all = shape.group * shape.slots;
    const int column = int(index % quarter) * 4;
    index /= quarter;
    const int row = int(index % all);
    index /= all;
    const int64_t base = index * shape.splits * all + row;
    float top = -INFINITY;
    for (int s = 0; s < shape.splits; ++s) top = ::sycl::fmax(top, stats[2 * (base + int64_t(s) * all)]);
    const float from = finite_top(top);
    Four merged(0.0f);
    float total = 0;
    for (int s = 0; s < shape.splits; ++s) {
      const int64_t part = base + int64_t(s) * all;
      if (stats[2 * part] == -INFINITY) continue;
      const float weight = ::sycl::exp2(stats[2 * part] - from);
      total += weight * stats[2 * part + 1];
      merged += weight * *reinterpret_cast<const Four*>(sums + part * shape.head_dim + column);
    }
    const int64_t batch = index / shape.kv_heads, head = index % shape.kv_heads * shape.group + row / shape.slots;
    T* to = out + batch * shape.out.a + head * shape.out.b + row % shape.slots * shape.out.c + column;
    store_four<T>(to, merged * (total > 0 ? 1.0f / total : 0.0f), shape.aligned != 0);
  }
};

}  // namespace pydflash::sycl_backend
