// Work items are (sequence, KV head, block of folded query rows, chunk of context). Chunks depend on the sequence
// alone and their partial results are merged in order, so results depend neither on threads nor on the batch.
#include <omp.h>

#include "cpu/kept.h"

#if defined(__AMX_BF16__)
#include "cpu/attention_amx.h"
#elif defined(__AVX512BF16__)
#include "cpu/attention_pairs.h"
#else
#include "cpu/attention_words.h"
#endif

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int64_t kChunkKeys = 512;  // at least, where a context is split
constexpr int64_t kMaxChunks = 32;

// What the slots of one sequence see: context positions from `first` to `length`, and the block keys in `seen`.
struct Span {
  int64_t first, length, chunk_keys;
  int chunks;
  uint64_t seen;
};

// Block keys that slot i sees: its bits, of slots that exist, inside the window.
uint64_t visible_keys(const BlockAttentionParams& p, int batch, int i) {
  const int32_t* depths = p.depths + batch * p.depths_stride;
  uint64_t bits = uint64_t(p.visibility[batch * p.visibility_stride + i]) & (~uint64_t(0) >> (64 - p.slots));
  if (p.window > 0)
    for (int j = 0; j < p.slots; ++j) {
      const int64_t distance = int64_t(depths[i]) - depths[j];
      if (distance >= p.window || -distance >= p.window) bits &= ~(uint64_t(1) << j);
    }
  return bits;
}

int64_t first_position(const BlockAttentionParams& p, int batch, int i) {
  const int64_t length = p.lengths[batch];
  int64_t first = length > p.capacity ? length - p.capacity : 0;
  const int64_t position = length + p.depths[batch * p.depths_stride + i];
  if (p.window > 0 && position - p.window + 1 > first) first = position - p.window + 1;
  return first < length ? first : length;
}

Span span_of(const BlockAttentionParams& p, int batch) {
  Span span{p.lengths[batch], p.lengths[batch], 0, 1, 0};
  for (int i = 0; i < p.slots; ++i) {
    const int64_t first = first_position(p, batch, i);
    if (first < span.first) span.first = first;
    span.seen |= visible_keys(p, batch, i);
  }
  const int64_t keys = span.length - span.first;
  int64_t chunks = keys / kChunkKeys;
  chunks = chunks < 1 ? 1 : chunks > kMaxChunks ? kMaxChunks : chunks;
  span.chunk_keys = round_up((keys + chunks - 1) / chunks, 32);
  if (keys > 0) span.chunks = int((keys + span.chunk_keys - 1) / span.chunk_keys);
  return span;
}

template <class Products>
class Attention {
 public:
  using T = typename Products::Type;

  explicit Attention(const BlockAttentionParams& p)
      : p_(p), group_(p.num_heads / p.num_kv_heads), width_(int(round_up(p.head_dim, kRowAlign))) {
    const int rows = group_ * p.slots;
    blocks_ = (rows + kMaxRows - 1) / kMaxRows;
    block_rows_ = int(round_up((rows + blocks_ - 1) / blocks_, kRowAlign));
    blocks_ = (rows + block_rows_ - 1) / block_rows_;
    units_ = p.batch * p.num_kv_heads * blocks_;
    partial_floats_ = int64_t(block_rows_) * (width_ + 2);
    // Per thread: scores, decay and row limits, then what the products need.
    thread_floats_ = int64_t(block_rows_) * (Products::kKeys + 4 + kMaxChunks) +
                     round_up(Products::scratch_floats(block_rows_, p.head_dim), 16);
  }

  void operator()() {
    static thread_local KeptMemory kept;
    int64_t work = 0;
    for (int b = 0; b < p_.batch; ++b) {
      const Span span = span_of(p_, b);
      if (span.chunks > max_chunks_) max_chunks_ = span.chunks;
      work += (span.length - span.first + p_.slots) * p_.num_heads * p_.slots * p_.head_dim;
    }
    const int threads = work > kParallelWork ? omp_get_max_threads() : 1;
    // As many units at a time as keep their partial results near the caches.
    const int64_t unit_floats = partial_floats_ * max_chunks_;
    int64_t wave = threads * kWaveFloats / unit_floats;
    wave = wave < 1 ? 1 : wave > units_ ? units_ : wave;
    const int64_t span_bytes = round_up(sizeof(Span) * p_.batch, 64);
    char* memory = kept.reserve(span_bytes + sizeof(float) * (wave * unit_floats + threads * thread_floats_));
    spans_ = reinterpret_cast<Span*>(memory);
    for (int b = 0; b < p_.batch; ++b) spans_[b] = span_of(p_, b);
    partials_ = reinterpret_cast<float*>(memory + span_bytes);
    float* thread_memory = partials_ + wave * unit_floats;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Worker worker(*this, thread_memory + omp_get_thread_num() * thread_floats_);
      for (int64_t start = 0; start < units_; start += wave) {
        const int64_t count = units_ - start < wave ? units_ - start : wave;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < count * max_chunks_; ++item)
          worker.attend(start + item / max_chunks_, int(item % max_chunks_), item);
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < count; ++unit) worker.merge(start + unit, unit * max_chunks_);
      }
    }
  }

 private:
  static constexpr int64_t kParallelWork = 1 << 21;  // multiply-adds per product: 50 us in float on one core
  static constexpr int64_t kWaveFloats = 1 << 18;

  RowBlock rows_of(int64_t unit) const {
    const int first = int(unit % blocks_) * block_rows_, all = group_ * p_.slots;
    const int rows = all - first < block_rows_ ? all - first : block_rows_;
    unit /= blocks_;
    return {int(unit / p_.num_kv_heads), int(unit % p_.num_kv_heads), first, rows, int(round_up(rows, kRowAlign))};
  }

  Partial partial(int64_t item) const {
    float* at = partials_ + item * partial_floats_;
    return {at, at + int64_t(block_rows_) * width_, at + int64_t(block_rows_) * (width_ + 1)};
  }

  class Worker {
   public:
    Worker(const Attention& all, float* memory)
        : all_(all), p_(all.p_), scores_(memory), decay_(scores_ + int64_t(all.block_rows_) * Products::kKeys),
          limits_(decay_ + all.block_rows_), chunk_weights_(limits_ + 3 * all.block_rows_),
          product_memory_(chunk_weights_ + kMaxChunks * all.block_rows_) {}

    // One chunk of context (and, with the last, the block) for one unit.
    void attend(int64_t unit, int chunk, int64_t item) {
      const RowBlock rows = all_.rows_of(unit);
      const Span& span = all_.spans_[rows.batch];
      if (chunk >= span.chunks) return;
      const Partial partial = all_.partial(item);
      memset(partial.sums, 0, sizeof(float) * rows.padded * all_.width_);
      for (int r = 0; r < rows.padded; ++r) partial.top[r] = -INFINITY, partial.total[r] = 0;
      Products products(product_memory_, rows.padded, p_.head_dim);
      const float factor = Products::factor_of(p_.scale * kLog2e);
      const RowLimits limits = load_rows(rows, products);

      const int64_t begin = span.first + chunk * span.chunk_keys;
      const int64_t end = begin + span.chunk_keys < span.length ? begin + span.chunk_keys : span.length;
      const auto at = [&](const void* data, const int64_t* stride, int64_t row) {
        return static_cast<const T*>(data) + rows.batch * stride[0] + rows.kv_head * stride[1] + row * stride[2];
      };
      const auto tile = [&](const T* k, int64_t k_stride, const T* v, int64_t v_stride, int keys, auto mask) {
        products.scores(k, k_stride, keys, scores_, v);
        mask();
        softmax_tile(scores_, keys, rows.padded, factor, partial, decay_);
        products.values(scores_, v, v_stride, keys, rows.rows, decay_, partial.sums, k + keys * k_stride);
      };
      for (int64_t s = begin; s < end;) {
        const int64_t row = s % p_.capacity;
        int64_t keys = end - s < p_.capacity - row ? end - s : p_.capacity - row;
        keys = keys < Products::kKeys ? keys : Products::kKeys;
        tile(at(p_.k_cache, p_.k_cache_stride, row), p_.k_cache_stride[2], at(p_.v_cache, p_.v_cache_stride, row),
             p_.v_cache_stride[2], int(keys), [&] {
               if (s < limits.last_first) mask_context(scores_, int(keys), rows.padded, limits, int32_t(s));
             });
        s += keys;
      }
      if (chunk + 1 < span.chunks) return;
      // Runs of block keys that some slot sees; the others may hold anything and are not read.
      for (int j = 0; j < p_.slots; ++j) {
        int keys = 0;
        while (j + keys < p_.slots && (span.seen >> (j + keys) & 1)) ++keys;
        if (keys > 0)
          tile(at(p_.k_block, p_.k_block_stride, j), p_.k_block_stride[2], at(p_.v_block, p_.v_block_stride, j),
               p_.v_block_stride[2], keys, [&] { mask_block(scores_, keys, rows.padded, limits, j); });
        j += keys;
      }
    }

    // The chunks of a unit in order, normalised, to the output.
    void merge(int64_t unit, int64_t item) {
      const RowBlock rows = all_.rows_of(unit);
      const int chunks = all_.spans_[rows.batch].chunks;
      for (int r = 0; r < rows.padded; r += kLanes) {
        Floats top = splat(-INFINITY), total = splat(0);
        for (int c = 0; c < chunks; ++c) top = max(load(all_.partial(item + c).top + r), top);
        const Floats from = top == splat(-INFINITY) ? splat(0) : top;
        for (int c = 0; c < chunks; ++c) {
          const Floats weight = exp2(load(all_.partial(item + c).top + r) - from);
          store(chunk_weights_ + c * rows.padded + r, weight);
          total += weight * load(all_.partial(item + c).total + r);
        }
        const Floats factor = total == splat(0) ? splat(0) : 1.0f / total;
        for (int c = 0; c < chunks; ++c) {
          float* weight = chunk_weights_ + c * rows.padded + r;
          store(weight, load(weight) * factor);
        }
      }
      for (int r = 0; r < rows.rows; ++r) {
        const int head = rows.kv_head * all_.group_ + (rows.first + r) / p_.slots, slot = (rows.first + r) % p_.slots;
        T* out = static_cast<T*>(p_.out) + rows.batch * p_.out_stride[0] + head * p_.out_stride[1] +
                 slot * p_.out_stride[2];
        const float* sums = all_.partial(item).sums + r * all_.width_;
        for (int d = 0; d < p_.head_dim; d += kLanes) {
          Floats sum = splat(chunk_weights_[r]) * load(sums + d);
          for (int c = 1; c < chunks; ++c)
            sum += splat(chunk_weights_[c * rows.padded + r]) * load(sums + c * all_.partial_floats_ + d);
          if constexpr (kLanes > 8)  // head_dim is a multiple of 8
            if (d + 8 == p_.head_dim) {
              store<8>(out + d, load_raw<VectorOf<8>::Floats>(&sum));
              continue;
            }
          store(out + d, sum);
        }
      }
    }

   private:
    // The scaled query into the products' layout, and what each row may see.
    RowLimits load_rows(const RowBlock& rows, Products& products) {
      int32_t* words = reinterpret_cast<int32_t*>(limits_);
      RowLimits limits{words, words + rows.padded, words + 2 * rows.padded, 0};
      const T* q[kLanes];
      for (int r = 0; r < rows.padded; ++r) {
        // Padding rows repeat the last row; nobody reads them.
        const int row = rows.first + (r < rows.rows ? r : rows.rows - 1);
        const int head = rows.kv_head * all_.group_ + row / p_.slots, slot = row % p_.slots;
        const uint64_t bits = visible_keys(p_, rows.batch, slot);
        limits.first_position[r] = int32_t(first_position(p_, rows.batch, slot));
        limits.low_bits[r] = int32_t(bits), limits.high_bits[r] = int32_t(bits >> 32);
        if (limits.first_position[r] > limits.last_first) limits.last_first = limits.first_position[r];
        q[r % kLanes] = static_cast<const T*>(p_.q) + rows.batch * p_.q_stride[0] + head * p_.q_stride[1] +
                        slot * p_.q_stride[2];
        if ((r + 1) % kLanes == 0) products.query_rows(r + 1 - kLanes, q, p_.scale * kLog2e);
      }
      return limits;
    }

    const Attention& all_;
    const BlockAttentionParams& p_;
    float *scores_, *decay_, *limits_, *chunk_weights_, *product_memory_;
  };

  const BlockAttentionParams& p_;
  int group_, width_, blocks_, block_rows_, units_, max_chunks_ = 1;
  int64_t partial_floats_, thread_floats_;
  Span* spans_ = nullptr;
  float* partials_ = nullptr;
};

}  // namespace

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
}  // namespace PYDFLASH_LEVEL
namespace pydflash::cpu::avx512 {
void block_attention(const BlockAttentionParams& p, Stream stream);
}
namespace pydflash::cpu::PYDFLASH_LEVEL {

// These levels differ from avx512 in bf16 alone.
void block_attention(const BlockAttentionParams& p, Stream stream) {
#if defined(__AMX_BF16__)
  using Products = TileProducts;
#else
  using Products = PairProducts;
#endif
  if (p.dtype == DType::bf16) return Attention<Products>{p}();
  avx512::block_attention(p, stream);
}
#else
void block_attention(const BlockAttentionParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { Attention<FloatProducts<decltype(type)>>{p}(); });
}
#endif

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
