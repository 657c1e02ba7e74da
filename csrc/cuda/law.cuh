// The target's law of one row of logits on a GPU: temperature, top-k, top-p, min-p and draws. A block of threads works
// on a row. Every filter keeps a prefix of the order, so the least key kept and the least weight kept describe them.
#pragma once

#include "cuda/candidates.cuh"

namespace pydflash::cuda {
namespace {

// Weights are e^((x - top) / temperature), so the largest is 1.
struct Law {
  float top, rate;
  float floor;     // the least weight kept
  uint64_t least;  // the least order_key kept

  __device__ __forceinline__ float weight(float x, int id) const {
    const float w = weight_of(x, top, rate);
    return order_key(x, id) >= least && w >= floor ? w : 0.0f;
  }
  // Whether the tile may hold weight.
  __device__ __forceinline__ bool alive(float tile_top, int tile) const {
    return weight(tile_top, tile * kTile) > 0;
  }
};

struct Filters {
  float temperature, top_p, min_p;
  int top_k;  // 0 = off
};

struct Drawn {
  int id;
  double total;  // of the weights
};

template <class T>
class RowLaw {
 public:
  // Reads the row's largest logit; with a law, takes one that was found before.
  __device__ RowLaw(const LogitRows& rows, int64_t index, CandidateMemory& shared, const Law& law = {NAN, 0, 0, 0})
      : row_(rows.row<T>(index)), tops_(rows.tops + index * rows.tiles), sums_(rows.sums + index * rows.tiles),
        masses_(rows.masses + index * rows.tiles), vocab_size_(rows.vocab_size), tiles_(rows.tiles), shared_(shared),
        candidates_(rows, index, shared, law.top), law_(law) {}

  __device__ const Law& law() const { return law_; }
  __device__ float mass(int tile) const { return __ldcg(masses_ + tile); }

  __device__ int argmax() {
    const float top = candidates_.top();
    unsigned best = 0;
#pragma unroll 1
    for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x))
      if (tops_[t] == top) best = max(best, ~unsigned(t));
    const int first = int(~block_max(best, shared_.exchange)) * kTile;
    best = 0;
#pragma unroll 1
    for (int id = first + int(threadIdx.x); id < min(first + kTile, vocab_size_); id += int(blockDim.x))
      if (no_nan(widen(row_[id])) == top) best = max(best, ~unsigned(id));
    return int(~block_max(best, shared_.exchange));
  }

  // Filters, and draws with u. `keep` does not draw, but leaves the masses of all tiles behind, for a residual.
  __device__ Drawn draw(const Filters& filters, float u, bool keep) {
    law_ = {candidates_.top(), rate_of(filters.temperature), fminf(filters.min_p, 1.0f), 0};
    const bool limited = filters.top_k > 0 && filters.top_k < vocab_size_, nucleus = filters.top_p < 1.0f;
    if (law_.top == -INFINITY) {
      law_.least = order_key(-INFINITY, 0);  // certain of id 0
    } else if (limited || nucleus) {
      Prefix prefix{};
      const double total = limited ? 0 : total_mass(false);
      const Target target =
          limited ? Target::count(filters.top_k) : Target::weights(filters.top_p * total, law_.rate);
      if (!limited || filters.top_k <= kList) {
        if (const int listed = candidates_.collect(target, prefix); listed > 0) {
          const int count = limited ? min(filters.top_k, listed) : listed;
          const Mark mark{nucleus ? double(filters.top_p) : 2.0, limited ? -1.0 : total, true};
          return listed <= kRanked ? draw_few(listed, count, mark, u, keep) : draw_many(listed, count, mark, u, keep);
        }
      } else {
        prefix = cut_long(target, filters);
      }
      if (prefix.found) law_.least = prefix.least;
    } else if (!(filters.min_p > 0)) {
      if (!keep) return locate(u, false);
      for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x)) __stcg(masses_ + t, whole_mass(t));
      return {0, total_mass(false)};
    }
    measure();
    if (keep) return {0, total_mass(true)};
    return locate(u, true);
  }

  // The masses of all tiles, as the filters leave them.
  __device__ __noinline__ void measure() {
#pragma unroll 1
    for (int tile = warp_index(); tile < tiles_; tile += num_warps()) measure(tile, [](float (&)[Tile<T>::kValues]) {});
    __syncthreads();
  }

  // For a whole warp: replaces the mass of a tile, after change(weights).
  template <class Change>
  __device__ __forceinline__ void measure(int tile, Change change) {
    using Of = Tile<T>;
    float sum = 0;
    if (law_.alive(tops_[tile], tile)) {
      float w[Of::kValues];
      load_tile(row_, vocab_size_, tile, w);
#pragma unroll
      for (int k = 0; k < Of::kValues; ++k) {
        const int id = tile * kTile + Of::at(k);
        w[k] = id < vocab_size_ ? law_.weight(w[k], id) : 0.0f;
      }
      change(w);
#pragma unroll
      for (int k = 0; k < Of::kValues; ++k) sum += w[k];
      sum = lane_sum(sum);
    }
    if (lane_index() == 0) __stcg(masses_ + tile, sum);
  }

  __device__ __noinline__ Drawn locate(float u, bool measured) {
    return locate(u, measured, [](int) { return 0.0f; });
  }

  // The first id whose cumulative weight, less taken(id), exceeds u * total; the masses must agree. Where they are not
  // measured, no filter is on.
  template <class Taken>
  __device__ __forceinline__ Drawn locate(float u, bool measured, Taken taken) {
    const auto tile_mass = [&](int t) { return double(measured ? mass(t) : whole_mass(t)); };
    const Crossing tile = cross(tiles_, tile_mass, Mark::beyond(u), shared_.exchange);
    if (tile.index < 0) return {0, 0};
    const int first = tile.index * kTile;
    const auto weight = [&](int i) {
      const int id = first + i;
      return double(fmaxf(law_.weight(no_nan(widen(row_[id])), id) - taken(id), 0.0f));
    };
    const Crossing token = cross(min(kTile, vocab_size_ - first), weight,
                                 {1.0, fmax(double(u) * tile.total - tile.before, 0.0), false}, shared_.exchange);
    return {first + max(token.index, 0), tile.total};
  }

 private:
  // Of a tile without filters, relative to the row's largest logit.
  __device__ __forceinline__ float whole_mass(int t) const {
    return sums_[t] * weight_of(tops_[t], law_.top, law_.rate);
  }

  __device__ __noinline__ double total_mass(bool measured) {
    double sum = 0;
#pragma unroll 1
    for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x)) sum += measured ? mass(t) : whole_mass(t);
    split(sum, Mark::beyond(0), shared_.exchange);
    const double total = shared_.exchange.total;
    __syncthreads();
    return total;
  }

  // A top-k that is too long to be listed, and top-p among those k.
  __device__ __noinline__ Prefix cut_long(Target target, const Filters& filters) {
    const Prefix prefix = candidates_.first(target, 0);
    if (!(filters.top_p < 1.0f)) return prefix;
    const Law whole = law_;
    law_.least = prefix.least, law_.floor = 0;
    measure();
    law_ = whole;
    const Prefix inside =
        candidates_.first(Target::weights(filters.top_p * total_mass(true), law_.rate), prefix.least);
    return inside.found ? inside : prefix;
  }

  // Draws from the first `count` of the tokens listed, cut where they reach the mark: each thread has one token, and
  // looks at all others.
  __device__ __noinline__ Drawn draw_few(int listed, int count, Mark mark, float u, bool keep) {
    const uint64_t* keys = shared_.keys;
    float* weights = shared_.weights;
    sort_descending(shared_.keys, listed);
    const int i = int(threadIdx.x);
    if (i < count) weights[i] = weight_of(key_value(keys[i]), law_.top, law_.rate);
    __syncthreads();
    double before = 0, total = 0;
#pragma unroll 1
    for (int j = 0; j < (i < count ? count : 0); ++j) {
      if (j < i) before += weights[j];
      total += weights[j];
    }
    const double mass = mark.share * (mark.whole < 0 ? total : mark.whole);
    const int kept = __syncthreads_count(i < count && (i == 0 || before < mass));
    law_.least = keys[kept - 1];
    const auto weight = [&](int j) { return weights[j] >= law_.floor ? double(weights[j]) : 0.0; };
    double sum = 0;
    total = 0;
#pragma unroll 1
    for (int j = 0; j < kept; ++j) {
      total += weight(j);
      if (key_id(keys[j]) <= key_id(keys[min(i, kept - 1)])) sum += weight(j);
    }
    if (i == 0) shared_.exchange.first = INT32_MAX, shared_.exchange.last = 0;
    __syncthreads();
    if (i < kept && weight(i) > 0) {
      if (sum > double(u) * total) atomicMin(&shared_.exchange.first, key_id(keys[i]));
      atomicMax(&shared_.exchange.last, key_id(keys[i]));
    }
    if (keep)
      for (int t = i; t < tiles_; t += int(blockDim.x)) __stcg(masses_ + t, 0.0f);
    __syncthreads();
    if (keep && i < kept) {
      double of_tile = 0;
      bool first = true;
#pragma unroll 1
      for (int j = 0; j < kept; ++j) {
        if (key_id(keys[j]) / kTile != key_id(keys[i]) / kTile) continue;
        first = first && j >= i;
        of_tile += weight(j);
      }
      if (first) __stcg(masses_ + key_id(keys[i]) / kTile, float(of_tile));
    }
    const int first = shared_.exchange.first, last = shared_.exchange.last;
    __syncthreads();
    return {first < INT32_MAX ? first : last, total};
  }

  // The same for more tokens than threads.
  __device__ __noinline__ Drawn draw_many(int listed, int count, Mark mark, float u, bool keep) {
    uint64_t* keys = shared_.keys;
    sort_descending(keys, listed);
    const auto weight = [&](int i) { return double(weight_of(key_value(keys[i]), law_.top, law_.rate)); };
    const int kept = cross(count, weight, mark, shared_.exchange).index + 1;
    law_.least = keys[kept - 1];
    __syncthreads();
    // By id: the lower half of a key is its complement.
#pragma unroll 1
    for (int i = int(threadIdx.x); i < kept; i += int(blockDim.x)) keys[i] = keys[i] << 32 | keys[i] >> 32;
    __syncthreads();
    sort_descending(keys, kept);
    const auto id_of = [&](int i) { return int(~unsigned(keys[i] >> 32)); };
    const auto weight_of_id = [&](int i) { return double(law_.weight(from_ordered(unsigned(keys[i])), id_of(i))); };
    const Crossing token = cross(kept, weight_of_id, Mark::beyond(u), shared_.exchange);
    if (keep) {
#pragma unroll 1
      for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x)) __stcg(masses_ + t, 0.0f);
      __syncthreads();
#pragma unroll 1
      for (int i = int(threadIdx.x); i < kept; i += int(blockDim.x)) {
        const int tile = id_of(i) / kTile;
        if (i > 0 && id_of(i - 1) / kTile == tile) continue;
        double sum = 0;
        for (int j = i; j < kept && id_of(j) / kTile == tile; ++j) sum += weight_of_id(j);
        __stcg(masses_ + tile, float(sum));
      }
    }
    return {id_of(max(token.index, 0)), token.total};
  }

  const T* const row_;
  const float *const tops_, *const sums_;
  float* const masses_;
  const int vocab_size_, tiles_;
  CandidateMemory& shared_;
  Candidates<T> candidates_;
  Law law_;
};

}  // namespace
}  // namespace pydflash::cuda
