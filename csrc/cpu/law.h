// The target's law of one row of logits: temperature, top-k, top-p, min-p and draws, without sorting the vocabulary.
// Every filter keeps a prefix of the order (larger value, then lower id), so one pair (cut, cut_id) describes it.
#pragma once

#include "cpu/top_k.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr float kUnderflow = -105.0f;  // e^x is 0 below it
constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 16.0f;

struct Weighted {
  float value, weight;
};

struct LawScratch {
  float *maxima, *sums;  // one per block
  Weighted* bucket;      // one per token, where Law::needs_bucket
};

// Weights are e^((x - max) / temperature), so the largest is 1. They are never stored: a block of them is computed
// whenever it is needed, and blocks that hold nothing of weight are skipped by their maximum.
template <class T>
class Law {
 public:
  Law(int64_t size, LawScratch scratch)
      : size_(size), blocks_(num_blocks(size)), maxima_(scratch.maxima), sums_(scratch.sums),
        bucket_(scratch.bucket) {}

  // Whether filter() will need LawScratch::bucket.
  static bool needs_bucket(int64_t size, int top_k, float top_p) {
    return limits(size, top_k) ? top_k > kMaxCandidates : top_p < 1.0f;
  }

  void read(const T* row) {
    row_ = row;
    block_maxima(row, size_, maxima_);
    max_ = largest_of(maxima_, blocks_);
  }

  int64_t argmax() const { return nth_equal(max_, 0); }

  void filter(float temperature, int top_k, float top_p, float min_p) {
    // A finite, positive rate keeps 0 * rate and -inf * rate from becoming NaN.
    const float rate = 1.0f / temperature;
    rate_ = rate < 1.17549435e-38f ? 1.17549435e-38f : rate > 3.40282347e38f ? 3.40282347e38f : rate;
    cut_ = -kInfinity, cut_id_ = size_ - 1;
    floor_ = 0, least_ = kUnderflow;
    if (max_ == -kInfinity) {
      cut_id_ = 0;  // a row without any finite value is certain of id 0
      return measure();
    }
    const bool limited = limits(size_, top_k);
    if (limited && top_k <= kMaxCandidates) {
      cut_to_candidates(top_k, top_p);
    } else {
      if (limited) cut_to_prefix(top_k, kInfinity, 0);
      if (top_p < 1.0f) {
        measure();
        // What weighs less than this holds, all together, less than the mass to drop: dropped for certain.
        const double light = (1.0 - top_p) * total_ / double(size_) * 0.5;
        cut_to_prefix(size_, top_p > 0 ? top_p * total_ : 1e-30, float(light));
      }
    }
    if (min_p > 0) {
      floor_ = min_p < 1.0f ? min_p : 1.0f;
      const float bound = logf(floor_) - 1e-3f;
      least_ = bound > least_ ? bound : least_;
    }
    measure();
  }

  int64_t blocks() const { return blocks_; }
  double total() const { return total_; }

  // Whether a block may hold weight.
  bool alive(int64_t b) const { return maxima_[b] >= cut_ && !((maxima_[b] - max_) * rate_ < least_); }

  // The kBlock weights of block b, 0 for what the filters drop and behind the end of the row.
  void weigh(int64_t b, float* weights) const {
    alignas(64) float x[kBlock];
    load_block(row_, size_, b, x);
    weigh_values(x, weights);
    const int64_t last = cut_id_ - b * kBlock;
    const int32_t last_tie = last < 0 ? -1 : last < kBlock ? int32_t(last) : kBlock;
    for (int j = 0; j < kBlock; j += kLanes) {
      const Floats value = load(x + j), weight = load(weights + j);
      const Ints kept = (value > cut_) | ((value == cut_) & (lane_ids(j) <= last_tie));
      store(weights + j, kept & (weight >= floor_) ? weight : splat(0.0f));
    }
  }

  float weight(int64_t id) const {
    alignas(64) float weights[kBlock];
    weigh(id / kBlock, weights);
    return weights[id % kBlock];
  }

  // Sums the weights of all blocks; total() is the sum of the sums, always in the same order.
  void measure() {
    alignas(64) float weights[kBlock];
    for (int64_t b = 0; b < blocks_; ++b) {
      sums_[b] = 0;
      if (!alive(b)) continue;
      weigh(b, weights);
      set_sum(b, weights);
    }
    add_up();
  }

  // Replaces the sum of one block; add_up() makes total() follow.
  void set_sum(int64_t b, const float* weights) { sums_[b] = sum_of(weights); }
  void add_up() {
    total_ = 0;
    for (int64_t b = 0; b < blocks_; ++b) total_ += sums_[b];
  }

  // The first id whose cumulative weight exceeds u * total(); weigh_block(b, weights) must agree with the sums.
  template <class Weigh>
  int64_t locate(float u, Weigh weigh_block) const {
    const double threshold = double(u) * total_;
    double before = 0;
    int64_t chosen = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(sums_[b] > 0)) continue;
      chosen = b;
      if (before + sums_[b] > threshold) break;
      before += sums_[b];
    }
    alignas(64) float weights[kBlock];
    weigh_block(chosen, weights);
    int last = 0;  // of positive weight: where rounding leaves the threshold just beyond the block
    for (int j = 0; j < kBlock && before <= threshold; ++j) {
      if (!(weights[j] > 0)) continue;
      last = j;
      before += weights[j];
    }
    return chosen * kBlock + last;
  }

  int64_t draw(float u) const {
    return locate(u, [this](int64_t b, float* weights) { weigh(b, weights); });
  }

 private:
  static bool limits(int64_t size, int top_k) { return top_k > 0 && top_k < size; }

  static Ints lane_ids(int first) {
    Ints ids;
    for (int i = 0; i < kLanes; ++i) ids[i] = first + i;
    return ids;
  }

  static float sum_of(const float* weights) {
    Floats sum = load(weights);
    for (int j = kLanes; j < kBlock; j += kLanes) sum += load(weights + j);
    return sum_lanes(sum);
  }

  void weigh_values(const float* x, float* weights) const {
    for (int j = 0; j < kBlock; j += kLanes) {
      const Floats value = load(x + j);
      // The maximum first: it may be infinite.
      store(weights + j, exp(value == max_ ? splat(0.0f) : (value - max_) * rate_));
    }
  }

  // The id of the n-th token, from 0, whose logit is `value`.
  int64_t nth_equal(float value, int64_t n) const {
    alignas(64) float x[kBlock];
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!(maxima_[b] >= value)) continue;
      load_block(row_, size_, b, x);
      for (int j = 0; j < kBlock; ++j)
        if (x[j] == value && n-- == 0) return b * kBlock + j;
    }
    return size_ - 1;
  }

  // A small top-k, and top-p among those k.
  void cut_to_candidates(int count, float top_p) {
    uint64_t keys[kMaxCandidates];
    top_k(row_, size_, maxima_, count, keys);
    int kept = count;
    if (top_p < 1.0f) {
      alignas(64) float weights[kMaxCandidates], x[kBlock];
      double total = 0;
      for (int c = 0; c < count; c += kBlock) {
        for (int j = 0; j < kBlock; ++j) x[j] = c + j < count ? key_value(keys[c + j]) : -kInfinity;
        weigh_values(x, weights + c);
      }
      for (int c = 0; c < count; ++c) total += weights[c];
      double before = weights[0];
      for (kept = 1; kept < count && before < top_p * total; ++kept) before += weights[kept];
    }
    cut_ = key_value(keys[kept - 1]);
    cut_id_ = key_id(keys[kept - 1]);
  }

  // Buckets of the order: equal steps of (max - x) / temperature, the last one open.
  Ints buckets_of(Floats value) const {
    const Floats distance = value == max_ ? splat(0.0f) : (max_ - value) * (rate_ * kBucketsPerUnit);
    const Floats last = splat(kBuckets - 1);
    return __builtin_convertvector(distance < last ? distance : last, Ints);
  }

  // visit(value, weight, bucket) for every kept token that weighs more than `light`, in buckets first..last.
  template <class Visit>
  void each_heavy(float light, int first, int last, Visit visit) const {
    alignas(64) float x[kBlock], weights[kBlock];
    alignas(64) int32_t buckets[kBlock], wanted[kBlock];
    for (int64_t b = 0; b < blocks_; ++b) {
      if (!alive(b) || buckets_of(splat(maxima_[b]))[0] > last) continue;
      load_block(row_, size_, b, x);
      weigh(b, weights);
      for (int j = 0; j < kBlock; j += kLanes) {
        const Ints bucket = buckets_of(load(x + j));
        const Ints want = (load(weights + j) > light) & (bucket >= first) & (bucket <= last);
        memcpy(buckets + j, &bucket, sizeof(bucket));
        memcpy(wanted + j, &want, sizeof(want));
      }
      int picked[kBlock], count = 0;
      for (int j = 0; j < kBlock; ++j) {  // without a branch: which tokens are wanted cannot be predicted
        picked[count] = j;
        count -= wanted[j];
      }
      for (int i = 0; i < count; ++i) visit(x[picked[i]], weights[picked[i]], buckets[picked[i]]);
    }
  }

  // Cuts to the longest prefix of at most `count` tokens in which the mass before each token is below `mass`.
  // Tokens that weigh no more than `light` must lie beyond it. A histogram finds the bucket where the prefix ends.
  void cut_to_prefix(int64_t count, double mass, float light) {
    struct {
      int64_t count = 0;
      double mass = 0;
    } held[kBuckets];
    each_heavy(light, 0, kBuckets - 1, [&](float, float weight, int bucket) {
      ++held[bucket].count;
      held[bucket].mass += weight;
    });
    int end = 0;
    for (; end < kBuckets && held[end].count < count && held[end].mass < mass; ++end) {
      count -= held[end].count;
      mass -= held[end].mass;
    }
    if (end == kBuckets) return;  // all tokens of any weight are kept
    int64_t size = 0;
    each_heavy(light, end, end, [&](float value, float weight, int) { bucket_[size++] = {value, weight}; });
    cut_inside(size, count, mass);
  }

  // The same inside bucket_[0, size), by quickselect on (count, mass).
  void cut_inside(int64_t size, int64_t count, double mass) {
    const float earlier = cut_;  // of a top-k: its last ties are gone already
    const int64_t earlier_id = cut_id_;
    for (Weighted* part = bucket_; size > 0;) {
      const float pivot = middle(part[0].value, part[size / 2].value, part[size - 1].value);
      int64_t above = 0, at = 0, below = size;  // [0, above) > pivot, [above, at) == pivot, [below, size) < pivot
      double mass_above = 0;
      float weight = 0;
      while (at < below) {
        const Weighted token = part[at];
        if (token.value > pivot) {
          mass_above += token.weight;
          part[at++] = part[above];
          part[above++] = token;
        } else if (token.value < pivot) {
          part[at] = part[--below];
          part[below] = token;
        } else {
          weight = token.weight;
          ++at;
        }
      }
      if (above >= count || mass_above >= mass) {
        size = above;
        continue;
      }
      count -= above, mass -= mass_above;
      const int64_t ties = at - above;
      cut_ = pivot, cut_id_ = pivot == earlier ? earlier_id : size_ - 1;
      if (ties >= count || double(ties) * weight >= mass) {
        const double fit = ceil(mass / weight);  // ties before which the mass is below `mass`
        int64_t taken = ties < count ? ties : count;
        if (fit < double(taken)) taken = fit < 1 ? 1 : int64_t(fit);
        cut_id_ = nth_equal(pivot, taken - 1);
        return;
      }
      count -= ties, mass -= double(ties) * weight;
      part += at, size -= at;
    }
    // Rounding put the end of the prefix just beyond the bucket: cut_ is its last value, with all ties.
  }

  static float middle(float a, float b, float c) {
    const float low = a < b ? a : b, high = a < b ? b : a;
    return c < low ? low : c > high ? high : c;
  }

  const int64_t size_, blocks_;
  float *const maxima_, *const sums_;
  Weighted* const bucket_;
  const T* row_ = nullptr;
  float max_ = 0, rate_ = 1, cut_ = 0, floor_ = 0, least_ = 0;
  int64_t cut_id_ = 0;
  double total_ = 0;
};

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
