// The tokens of a row that come first, by count or by mass, without sorting the row. A block of threads works on a row.
#pragma once

#include "cuda/logit_rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kList = 4096;        // tokens that can be listed in shared memory
constexpr int kBins = 1024, kDigit = 10;
constexpr int kMaxGroups = 3072;   // groups that are looked through for them
constexpr float kMassUnit = 1099511627776.0f;  // 2^40: weights as integers, so that their sum has no order
constexpr float kLeastExponent = 41.0f;        // a weight of 2^-41 is 0 in that unit

// How many items, or which mass, a prefix must hold.
struct Target {
  bool mass;
  double amount;  // a mass in units
  float rate;     // of the weights

  __device__ static Target count(int64_t count) { return {false, double(count), 0}; }
  __device__ static Target weights(double mass, float rate) {
    return {true, mass > 0 ? ceil(mass * kMassUnit) : 1.0, rate};
  }
};

struct Bins {
  unsigned count[kBins], low[kBins], high[kBins];  // low and high: the mass

  __device__ __forceinline__ double amount(int bin, bool mass) const {
    return mass ? double(uint64_t(high[bin]) << 32 | low[bin]) : double(count[bin]);
  }
};

// Keys of items from low to high, in bins from the largest on: by equal steps of the key, or of the logit, which
// spreads the bulk of a row over more bins.
struct Digit {
  uint64_t low, high;
  int shift;
  float width, inverse;  // of a bin in logits, or 0
  Target target;
  float top;

  // The largest key's upper half in a bin.
  __device__ __forceinline__ unsigned edge(int bin) const { return ordered(fmaf(-float(bin), width, top)); }

  __device__ __forceinline__ int bin_of(uint64_t key, float value) const {
    if (!(width > 0)) return int((high - key) >> shift);
    const unsigned half = unsigned(key >> 32);
    int bin = int(fminf((top - value) * inverse, float(kBins - 1)));
    while (bin > 0 && half > edge(bin)) --bin;
    while (bin < kBins - 1 && half <= edge(bin + 1)) ++bin;
    return bin;
  }

  // Narrows the keys to those of a bin.
  __device__ void enter(int bin, int vocab_size) {
    if (width > 0) {
      high = min(high, uint64_t(edge(bin)) << 32 | 0xffffffffu);
      if (bin < kBins - 1) low = max(low, uint64_t(edge(bin + 1) + 1) << 32);
      width = 0;
    } else {
      high -= uint64_t(bin) << shift;
      const uint64_t step = (uint64_t(1) << shift) - 1;
      if (high - low > step) low = high - step;
    }
    // Of one value only the ids are left, which are fewer than 32 bits can tell.
    const uint64_t least = (high | 0xffffffffu) - unsigned(vocab_size - 1);
    if (low >> 32 == high >> 32 && low < least && least <= high) low = least;
  }

  __device__ __forceinline__ void add(uint64_t key, float value, Bins& bins) const {
    if (key < low || key > high) return;
    const int bin = bin_of(key, value);
    atomicAdd(&bins.count[bin], 1u);
    if (!target.mass) return;
    const uint64_t mass = __float2ull_rn(weight_of(value, top, target.rate) * kMassUnit);
    const unsigned part = unsigned(mass);
    const unsigned carry = atomicAdd(&bins.low[bin], part) > ~part;
    if (const unsigned rest = unsigned(mass >> 32) + carry; rest != 0) atomicAdd(&bins.high[bin], rest);
  }
};

struct CandidateMemory {
  uint64_t keys[kList];
  union {
    Bins bins;
    int groups[kMaxGroups];
  };
  float weights[kRanked];
  Exchange exchange;
  unsigned num_keys, num_groups;
};

// A prefix of the order: all tokens with order_key >= least.
struct Prefix {
  uint64_t least;
  int64_t count;
  bool found;  // false where all that there is falls short of what was asked for
};

template <class T>
class Candidates {
 public:
  // `top`: the row's largest logit, NaN where it is to be found.
  __device__ Candidates(const LogitRows& rows, int64_t index, CandidateMemory& shared, float top)
      : row_(rows.row<T>(index)), tops_(rows.tops + index * rows.tiles),
        groups_(rows.groups + index * rows.tiles * kTileGroups), vocab_size_(rows.vocab_size), tiles_(rows.tiles),
        shared_(shared) {
    most_ = ordered(top);
    if (!(top == top)) {
      unsigned most = 0;
#pragma unroll 1
      for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x)) most = max(most, ordered(tops_[t]));
      most_ = block_max(most, shared.exchange);
    }
    top_ = from_ordered(most_);
  }

  __device__ float top() const { return top_; }

  // Lists at least the first tokens that reach the target, unordered, and returns the number listed. Where there are
  // more than kList to list it returns 0, and `prefix` holds those first tokens exactly. The groups must be there.
  __device__ int collect(Target target, Prefix& prefix) {
    uint64_t low = 0;
    if (target.mass) {
      low = key_of_least_mass(target.rate);
    } else if (target.amount <= tiles_) {
      // As many tiles as tokens are wanted have a largest token, so the least of those bounds the last token wanted.
      unsigned inverse = 0;
#pragma unroll 1
      for (int t = int(threadIdx.x); t < tiles_; t += int(blockDim.x)) inverse = max(inverse, ~ordered(tops_[t]));
      low = uint64_t(~block_max(inverse, shared_.exchange)) << 32;
    }
    prefix = narrow(false, low, target, kMaxGroups);
    if (prefix.found ? prefix.count <= kMaxGroups : vocab_size_ <= kList) {
      const int listed = list_groups(prefix.found ? prefix.least : 0);
      if (listed <= kList) return listed;
    }
    prefix = narrow(true, low, target, kList);
    return prefix.found && prefix.count <= kList ? list_tokens(prefix.least) : 0;
  }

  // The first tokens that reach the target, of those with a key of at least `low`.
  __device__ Prefix first(Target target, uint64_t low) {
    const uint64_t bound = target.mass ? key_of_least_mass(target.rate) : 0;
    return narrow(true, low > bound ? low : bound, target, target.mass ? 0 : int64_t(target.amount));
  }

 private:
  __device__ uint64_t key_of_least_mass(float rate) const {
    return uint64_t(min(most_, ordered(top_ - kLeastExponent / rate))) << 32;
  }

  // The shortest prefix, of the tokens or the groups with a key of at least `low`, that reaches the target; or one a
  // little longer, where it holds no more than `limit` items. A group has its largest token's value.
  __device__ __noinline__ Prefix narrow(bool tokens, uint64_t low, Target target, int64_t limit) {
    Bins& bins = shared_.bins;
    Digit digit{low, uint64_t(most_) << 32 | 0xffffffffu, 0, 0, 0, target, top_};
    const float width = kLeastExponent / (target.rate * kBins);
    if (target.mass && width < 1e30f && ordered(top_ - width) < most_) digit.width = width, digit.inverse = 1 / width;
    for (int64_t held = -1;;) {
      const int bits = 64 - __clzll((long long)(digit.high - digit.low)), shift = bits > kDigit ? bits - kDigit : 0;
      digit.shift = shift;
#pragma unroll 1
      for (int i = int(threadIdx.x); i < kBins; i += int(blockDim.x)) bins.count[i] = bins.low[i] = bins.high[i] = 0;
      __syncthreads();
      if (tokens)
        each_token(digit.low, [&](uint64_t key, float value) { digit.add(key, value, bins); });
      else
        each_group([&](uint64_t key, float value) { digit.add(key, value, bins); });
      __syncthreads();
      const Crossing end = cross(
          kBins, [&](int i) { return bins.amount(i, target.mass); }, {1.0, digit.target.amount, true},
          shared_.exchange);
      if (held < 0) {
        if (end.total < digit.target.amount) return {low, 0, false};
        held = 0;
      }
      const unsigned inside = bins.count[end.index];
      int64_t above = int64_t(end.before);
      if (target.mass) {
        unsigned sum = 0;
#pragma unroll 1
        for (int i = int(threadIdx.x); i < end.index; i += int(blockDim.x)) sum += bins.count[i];
        above = block_sum(sum, shared_.exchange);
      }
      held += above;
      const bool several = digit.width > 0 || shift > 0;  // keys in a bin
      digit.enter(end.index, max(vocab_size_, 2 * kGroup));  // there may be more groups than tokens
      // A bin that is small beside the rest costs less to list than to look into.
      const int64_t through = held + inside;
      const bool close = through <= limit && inside <= 32 + through / 4;
      __syncthreads();
      if (close || inside == 1 || !several) return {digit.low, through, true};
      digit.target.amount -= end.before;
    }
  }

  template <class Visit>
  __device__ __forceinline__ void each_group(Visit visit) const {
    constexpr int kAhead = 5;
    const int count = tiles_ * kTileGroups, threads = int(blockDim.x);
#pragma unroll 1
    for (int base = int(threadIdx.x); base < count; base += kAhead * threads) {
      float top[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) top[i] = base + i * threads < count ? groups_[base + i * threads] : 0.0f;
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (base + i * threads < count) visit(order_key(top[i], base + i * threads), top[i]);
    }
  }

  template <class Visit>
  __device__ __forceinline__ void each_token(uint64_t low, Visit visit) const {
    using Of = Tile<T>;
#pragma unroll 1
    for (int tile = warp_index(); tile < tiles_; tile += num_warps()) {
      if (order_key(tops_[tile], tile * kTile) < low) continue;
#pragma unroll 1
      for (int i = 0; i < Of::kValues; i += Of::kVector) {
        float x[Of::kVector];
        widen(load_piece(row_, vocab_size_, tile, i), x);
#pragma unroll
        for (int j = 0; j < Of::kVector; ++j) {
          const int id = tile * kTile + Of::at(i) + j;
          const float value = no_nan(x[j]);
          if (id < vocab_size_ && ordered(value) >= unsigned(low >> 32)) visit(order_key(value, id), value);
        }
      }
    }
  }

  // Lists the tokens of the groups of a prefix of groups that are not below its last group's largest.
  __device__ __noinline__ int list_groups(uint64_t least) {
    if (threadIdx.x == 0) shared_.num_groups = shared_.num_keys = 0;
    __syncthreads();
    each_group([&](uint64_t key, float) {
      if (key < least) return;
      const unsigned at = atomicAdd(&shared_.num_groups, 1u);
      if (at < kMaxGroups) shared_.groups[at] = key_id(key);
    });
    __syncthreads();
    const unsigned floor = unsigned(least >> 32);
    const int count = min(int(shared_.num_groups), kMaxGroups);
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int base = warp_index(); base < count; base += kAhead * num_warps()) {
      float x[kAhead];
      int id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = base + i * num_warps();
        id[i] = at < count ? shared_.groups[at] * kGroup + lane_index() : vocab_size_;
        if (id[i] < vocab_size_) x[i] = no_nan(widen(row_[id[i]]));
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (id[i] >= vocab_size_ || ordered(x[i]) < floor) continue;
        const unsigned at = atomicAdd(&shared_.num_keys, 1u);
        if (at < kList) shared_.keys[at] = order_key(x[i], id[i]);
      }
    }
    __syncthreads();
    return int(shared_.num_keys);
  }

  __device__ __noinline__ int list_tokens(uint64_t least) {
    if (threadIdx.x == 0) shared_.num_keys = 0;
    __syncthreads();
    each_token(least, [&](uint64_t key, float) {
      if (key >= least) shared_.keys[atomicAdd(&shared_.num_keys, 1u)] = key;
    });
    __syncthreads();
    return int(shared_.num_keys);
  }

  const T* const row_;
  const float *const tops_, *const groups_;
  const int vocab_size_, tiles_;
  CandidateMemory& shared_;
  unsigned most_;
  float top_;
};

}  // namespace
}  // namespace pydflash::cuda
