// Work items are (sequence, KV head, block of folded query rows, chunk of context). A row's bits depend on its query and
// the keys it sees alone: not on which of the last 64 lie in the cache and which in the block, on what lies between
// them, on other rows, the batch or threads. So chunks and tiles begin at fixed positions, and keys that may be in the
// block are a tail merged last: weights and sums in float, key after key, where one not seen adds nothing.
#include "cpu/crew.h"
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

constexpr int64_t kChunkKeys = 512;  // the first chunks' size
constexpr int64_t kEvenChunks = 16;  // so many chunks, then twice their size after as many more, and so on
constexpr int64_t kTailKeys = 64;    // the most slots: a row's own key and those that may be in the block before it
constexpr int64_t kMaxTail = kTailKeys - 1 + 64;  // of all rows: context keys, then slots

// Chunks are longer the further on they are, so that their number stays small; all begin at multiples of kChunkKeys.
constexpr int64_t chunk_begin(int64_t chunk) {
  const int64_t units =
      chunk < kEvenChunks ? chunk : (kEvenChunks + chunk % kEvenChunks) << (chunk / kEvenChunks - 1);
  return kChunkKeys * units;
}

// What the slots of one sequence see: settled context from `begin` to `end`, in `chunks` chunks from first_chunk on;
// the tail from `tail` to `length`, and the block keys in `seen`.
struct Span {
  int64_t begin, end, tail, length;
  int first_chunk, chunks;
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

// Context of slot i from here on is its tail. Depths that no chain or tree has get a tail of another size.
int64_t settled_end(const BlockAttentionParams& p, int batch, int i) {
  const int64_t depth = p.depths[batch * p.depths_stride + i];
  const int64_t inside = depth < 0 ? 0 : depth < kTailKeys ? depth : kTailKeys - 1;
  const int64_t end = p.lengths[batch] + inside - (kTailKeys - 1);
  return end > 0 ? end : 0;
}

Span span_of(const BlockAttentionParams& p, int batch) {
  const int64_t length = p.lengths[batch];
  Span span{length, 0, length, length, 0, 0, 0};
  for (int i = 0; i < p.slots; ++i) {
    const int64_t first = first_position(p, batch, i), settled = settled_end(p, batch, i);
    if (first < settled) {
      span.begin = first < span.begin ? first : span.begin;
      span.end = settled > span.end ? settled : span.end;
    }
    const int64_t tail = first > settled ? first : settled;
    span.tail = tail < span.tail ? tail : span.tail;
    span.seen |= visible_keys(p, batch, i);
  }
  if (span.begin >= span.end) return span;
  while (chunk_begin(span.first_chunk + 1) <= span.begin) ++span.first_chunk;
  while (chunk_begin(span.first_chunk + span.chunks) < span.end) ++span.chunks;
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
  }

  void operator()() {
    static thread_local KeptMemory kept;
    int64_t work = 0;
    for (int b = 0; b < p_.batch; ++b) {
      const Span span = span_of(p_, b);
      if (span.chunks > max_chunks_) max_chunks_ = span.chunks;
      const int64_t first = span.chunks > 0 ? span.begin : span.tail;
      work += (span.length - first + p_.slots) * p_.num_heads * p_.slots * p_.head_dim;
    }
    partials_of_unit_ = max_chunks_ + 1;
    // Per thread: see Worker.
    const int64_t thread_floats = int64_t(block_rows_) * (kScoreRows + 6 + partials_of_unit_) + kMaxTail * width_ +
                                  round_up(kStagedFloats * p_.head_dim, 16) +
                                  round_up(Products::scratch_floats(block_rows_, p_.head_dim), 16);
    const int threads = threads_for(work, kParallelWork);
    // As many units at a time as keep their partial results near the caches.
    const int64_t unit_floats = partial_floats_ * partials_of_unit_;
    int64_t wave = threads * kWaveFloats / unit_floats;
    wave = wave < 1 ? 1 : wave > units_ ? units_ : wave;
    const int64_t span_bytes = round_up(sizeof(Span) * p_.batch, 64);
    char* memory = kept.reserve(span_bytes + sizeof(float) * (wave * unit_floats + threads * thread_floats));
    spans_ = reinterpret_cast<Span*>(memory);
    for (int b = 0; b < p_.batch; ++b) spans_[b] = span_of(p_, b);
    partials_ = reinterpret_cast<float*>(memory + span_bytes);
    float* thread_memory = partials_ + wave * unit_floats;
    for (int64_t start = 0; start < units_; start += wave) {
      const int64_t count = units_ - start < wave ? units_ - start : wave;
      in_shares(count * max_chunks_, threads, [&](int64_t begin, int64_t end, int thread) {
        Worker worker(*this, thread_memory + thread * thread_floats);
        for (int64_t item = begin; item < end; ++item)
          worker.attend(start + item / max_chunks_, int(item % max_chunks_), item / max_chunks_ * partials_of_unit_);
      });
      in_shares(count, threads, [&](int64_t begin, int64_t end, int thread) {
        Worker worker(*this, thread_memory + thread * thread_floats);
        for (int64_t unit = begin; unit < end; ++unit) worker.merge(start + unit, unit * partials_of_unit_);
      });
    }
  }

 private:
  static constexpr int64_t kParallelWork = 1 << 19;  // multiply-adds per product: 12 us in float on one core
  static constexpr int64_t kWaveFloats = 1 << 18;
  // Of a tile or the tail; products write whole groups.
  static constexpr int64_t kScoreRows = (Products::kKeys > kMaxTail ? Products::kKeys : kMaxTail + 1) + 32;
  static constexpr int64_t kStagedFloats = 2 * Products::kKeys * int64_t(sizeof(T)) / int64_t(sizeof(float));

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
        : all_(all), p_(all.p_), scores_(memory), decay_(scores_ + kScoreRows * all.block_rows_),
          limits_(decay_ + all.block_rows_), chunk_weights_(limits_ + 5 * all.block_rows_),
          tail_values_(chunk_weights_ + int64_t(all.partials_of_unit_) * all.block_rows_),
          staged_(reinterpret_cast<T*>(tail_values_ + kMaxTail * all.width_)),
          product_memory_(tail_values_ + kMaxTail * all.width_ + round_up(kStagedFloats * p_.head_dim, 16)) {}

    // One chunk of context (and, with the last, the tail) for one unit.
    void attend(int64_t unit, int chunk, int64_t item) {
      const RowBlock rows = all_.rows_of(unit);
      const Span& span = all_.spans_[rows.batch];
      if (chunk > 0 && chunk >= span.chunks) return;
      Products products(product_memory_, rows.padded, p_.head_dim);
      const RowLimits limits = load_rows(rows, products);
      if (chunk < span.chunks)
        settled(rows, span, span.first_chunk + chunk, products, limits, all_.partial(item + chunk));
      if (chunk + 1 >= span.chunks) tail(rows, span, products, limits, all_.partial(item + span.chunks));
    }

    // The chunks of a unit in order, then its tail, normalised, to the output.
    void merge(int64_t unit, int64_t item) {
      const RowBlock rows = all_.rows_of(unit);
      const int chunks = all_.spans_[rows.batch].chunks + 1;
      for (int r = 0; r < rows.padded; r += kLanes) {
        Floats top = splat(-INFINITY), total = splat(0);
        for (int c = 0; c < chunks; ++c) top = max(load(all_.partial(item + c).top + r), top);
        const Floats from = top == splat(-INFINITY) ? splat(0) : top;
        for (int c = 0; c < chunks; ++c) {
          const Floats weight = weight_of(load(all_.partial(item + c).top + r) - from);
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
    const T* row_of(const RowBlock& rows, const void* data, const int64_t* stride, int64_t row) const {
      return static_cast<const T*>(data) + rows.batch * stride[0] + rows.kv_head * stride[1] + row * stride[2];
    }

    void clear(const RowBlock& rows, const Partial& partial) const {
      memset(partial.sums, 0, sizeof(float) * rows.padded * all_.width_);
      for (int r = 0; r < rows.padded; ++r) partial.top[r] = -INFINITY, partial.total[r] = 0;
    }

    float factor() const { return Products::factor_of(p_.scale * kLog2e); }

    // Settled context of one chunk, in tiles that lie at the same positions whoever asks. Where the context begins
    // inside a group of keys that are summed together, those missing have weights of zero.
    void settled(const RowBlock& rows, const Span& span, int chunk, Products& products, const RowLimits& limits,
                 const Partial& partial) {
      constexpr int64_t size = Products::kKeys;
      clear(rows, partial);
      const int64_t origin = chunk_begin(chunk), next = chunk_begin(chunk + 1);
      const int64_t begin = origin > span.begin ? origin : span.begin, end = next < span.end ? next : span.end;
      for (int64_t tile = begin - (begin - origin) % size; tile < end; tile += size) {
        const int64_t s = tile > begin ? tile : begin, stop = tile + size < end ? tile + size : end;
        const int64_t row = s % p_.capacity;
        const int keys = int(stop - s), missing = int((s - tile) % Products::kGroup);
        const bool wraps = keys > p_.capacity - row;
        const T* k = row_of(rows, p_.k_cache, p_.k_cache_stride, row);
        const T* v = row_of(rows, p_.v_cache, p_.v_cache_stride, row);
        int64_t k_stride = p_.k_cache_stride[2], v_stride = p_.v_cache_stride[2];
        if (wraps) k = stage(rows, p_.k_cache, p_.k_cache_stride, row, keys, 0, staged_), k_stride = p_.head_dim;
        if (wraps || missing > 0) {
          v = stage(rows, p_.v_cache, p_.v_cache_stride, row, keys, missing, staged_ + size * p_.head_dim);
          v_stride = p_.head_dim;
        }
        float* scores = scores_ + int64_t(missing) * rows.padded;
        for (float* at = scores_; at < scores; at += kLanes) store(at, splat(-INFINITY));
        products.scores(k, k_stride, keys, scores, v);
        if (s < limits.last_first) mask_before(scores, keys, rows.padded, limits.first, int32_t(s));
        if (stop > limits.least_settled) {
          const int whole = limits.least_settled > s ? int(limits.least_settled - s) : 0;
          mask_from(scores + int64_t(whole) * rows.padded, keys - whole, rows.padded, limits.settled,
                    int32_t(s + whole));
        }
        softmax_tile(scores_, missing + keys, rows.padded, factor(), partial, decay_);
        products.values(scores_, v, v_stride, missing + keys, rows.rows, decay_, partial.sums, k + keys * k_stride);
      }
    }

    // `count` rows of a cache from `row` on, around its end, behind `missing` rows of zeros.
    const T* stage(const RowBlock& rows, const void* data, const int64_t* stride, int64_t row, int count, int missing,
                   T* to) const {
      memset(to, 0, sizeof(T) * missing * p_.head_dim);
      for (int j = 0; j < count; ++j, row = row + 1 == p_.capacity ? 0 : row + 1)
        memcpy(to + int64_t(missing + j) * p_.head_dim, row_of(rows, data, stride, row), sizeof(T) * p_.head_dim);
      return to;
    }

    // The rest of the context and the block: one maximum, float weights, and sums key by key, to which a key that a
    // row does not see adds nothing.
    void tail(const RowBlock& rows, const Span& span, Products& products, const RowLimits& limits,
              const Partial& partial) {
      clear(rows, partial);
      int keys = 0;
      const auto append = [&](const T* k, int64_t k_stride, const T* v, int64_t v_stride, int count) {
        float* scores = scores_ + int64_t(keys) * rows.padded;
        products.scores(k, k_stride, count, scores, v);
        for (int j = 0; j < count; ++j, ++keys)
          for (int d = 0; d < p_.head_dim; d += kLanes)
            store(tail_values_ + int64_t(keys) * all_.width_ + d, load_row(v + j * v_stride + d, p_.head_dim - d));
        return scores;
      };
      for (int64_t s = span.tail; s < span.length;) {
        const int64_t row = s % p_.capacity;
        const int count = int(span.length - s < p_.capacity - row ? span.length - s : p_.capacity - row);
        float* scores = append(row_of(rows, p_.k_cache, p_.k_cache_stride, row), p_.k_cache_stride[2],
                               row_of(rows, p_.v_cache, p_.v_cache_stride, row), p_.v_cache_stride[2], count);
        mask_before(scores, count, rows.padded, limits.tail, int32_t(s));
        s += count;
      }
      // Runs of block keys that some slot sees; the others may hold anything and are not read.
      for (int j = 0; j < p_.slots; ++j) {
        int count = 0;
        while (j + count < p_.slots && (span.seen >> (j + count) & 1)) ++count;
        if (count > 0) {
          float* scores = append(row_of(rows, p_.k_block, p_.k_block_stride, j), p_.k_block_stride[2],
                                 row_of(rows, p_.v_block, p_.v_block_stride, j), p_.v_block_stride[2], count);
          mask_block(scores, count, rows.padded, limits, j);
        }
        j += count;
      }
      if (keys == 0) return;
      softmax_tile(scores_, keys, rows.padded, factor(), partial, decay_);
      multiply_all<FloatWords>({scores_, tail_values_, 1, rows.padded, all_.width_, keys, partial.sums, all_.width_,
                                nullptr, tail_values_, 0},
                               rows.rows, int(round_up(p_.head_dim, kLanes)) / kLanes);
    }

    // The scaled query into the products' layout, and what each row may see.
    RowLimits load_rows(const RowBlock& rows, Products& products) {
      int32_t* words = reinterpret_cast<int32_t*>(limits_);
      const int n = rows.padded;
      RowLimits limits{words, words + n, words + 2 * n, words + 3 * n, words + 4 * n, 0, INT32_MAX};
      const T* q[kLanes];
      for (int r = 0; r < rows.padded; ++r) {
        // Padding rows repeat the last row; nobody reads them.
        const int row = rows.first + (r < rows.rows ? r : rows.rows - 1);
        const int head = rows.kv_head * all_.group_ + row / p_.slots, slot = row % p_.slots;
        const uint64_t bits = visible_keys(p_, rows.batch, slot);
        const int32_t first = int32_t(first_position(p_, rows.batch, slot));
        const int32_t settled = int32_t(settled_end(p_, rows.batch, slot));
        limits.first[r] = first, limits.settled[r] = settled, limits.tail[r] = first > settled ? first : settled;
        limits.low_bits[r] = int32_t(bits), limits.high_bits[r] = int32_t(bits >> 32);
        if (first > limits.last_first) limits.last_first = first;
        if (settled < limits.least_settled) limits.least_settled = settled;
        q[r % kLanes] = static_cast<const T*>(p_.q) + rows.batch * p_.q_stride[0] + head * p_.q_stride[1] +
                        slot * p_.q_stride[2];
        if ((r + 1) % kLanes == 0) products.query_rows(r + 1 - kLanes, q, p_.scale * kLog2e);
      }
      return limits;
    }

    const Attention& all_;
    const BlockAttentionParams& p_;
    float *scores_, *decay_, *limits_, *chunk_weights_, *tail_values_;
    T* staged_;
    float* product_memory_;
  };

  const BlockAttentionParams& p_;
  int group_, width_, blocks_, block_rows_, units_, max_chunks_ = 1, partials_of_unit_ = 2;
  int64_t partial_floats_;
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
