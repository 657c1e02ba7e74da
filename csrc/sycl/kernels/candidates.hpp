// The tokens of a row that come first, by count or by mass, without sorting the row. A work-group has a row.
#pragma once

#include "sycl/kernels/logit_rows.hpp"
#include "sycl/kernels/team.hpp"

namespace pydflash::sycl_backend {

constexpr int kList = 2048;  // tokens that can be listed in local memory
constexpr int kBins = 1024, kDigit = 10;
constexpr int kMaxGroups = 3 * kBins;  // groups that are looked through for them

struct RowMemory {
  uint64_t keys[kList];
  union {
    struct {
      uint32_t count[kBins], low[kBins], high[kBins];  // low and high: the mass
    } bins;
    int groups[kMaxGroups];
  };
  float weights[kGroup];
  Crossing crossing;
  uint32_t num_keys, num_groups;
};

// How many items, or which mass in units of 2^-bits, a prefix must hold.
struct Target {
  bool mass;
  uint64_t amount;
  float rate;  // of the weights
  int bits;
};

// A prefix of the order: all tokens with order_key >= least.
struct Prefix {
  uint64_t least;
  int64_t count;
  bool found;  // false where all that there is falls short of what was asked for
};

// Keys from low to high, in bins of equal steps from the largest on.
struct Digit {
  uint64_t low, high;
  int shift;

  void split() {
    const int bits = 64 - int(::sycl::clz(high - low));
    shift = bits > kDigit ? bits - kDigit : 0;
  }

  // Narrows the keys to those of a bin.
  void enter(int bin, int vocab_size) {
    high -= uint64_t(bin) << shift;
    const uint64_t step = (uint64_t(1) << shift) - 1;
    if (high - low > step) low = high - step;
    // Of one value only the ids are left, which are fewer than 32 bits can tell.
    const uint64_t least = (high | 0xffffffffu) - uint32_t(vocab_size - 1);
    if (low >> 32 == high >> 32 && low < least && least <= high) low = least;
  }
};

template <class T>
class Candidates {
 public:
  Candidates(const Team& team, const T* row, const float* tops, int vocab_size, RowMemory& memory)
      : team_(team), row_(row), tops_(tops), vocab_size_(vocab_size), groups_(num_groups(vocab_size)),
        memory_(memory) {
    uint32_t most = 0;
    for (int g = team_.thread(); g < groups_; g += team_.size()) most = ::sycl::max(most, ordered(tops_[g]));
    most_ = team_.largest(most);
  }

  float top() const { return from_ordered(most_); }

  // Lists at least the first tokens that reach the target, unordered, and returns the number listed. Where there are
  // more than kList to list it returns 0, and `prefix` holds those first tokens exactly.
  int collect(const Target& target, Prefix& prefix) {
    uint64_t low = 0;
    if (target.mass) {
      low = key_of_least_mass(target);
    } else if (target.amount <= uint64_t(groups_)) {
      // As many groups as tokens are wanted have a largest token, so the least of those bounds the last token wanted.
      uint32_t least = ~0u;
      for (int g = team_.thread(); g < groups_; g += team_.size()) least = ::sycl::min(least, ordered(tops_[g]));
      low = uint64_t(team_.least(least)) << 32;
    }
    prefix = narrow(false, low, target, kMaxGroups);
    if (prefix.found ? prefix.count <= kMaxGroups : vocab_size_ <= kList) {
      const int listed = list_groups(prefix.found ? prefix.least : 0);
      if (listed <= kList) return listed;
    }
    prefix = narrow(true, low, target, kList);
    return prefix.found && prefix.count <= kList ? list_tokens(prefix.least) : 0;
  }

  // The first tokens that reach the target, of those with a key of at least `low`, exactly.
  Prefix first(const Target& target, uint64_t low) {
    const uint64_t bound = target.mass ? key_of_least_mass(target) : 0;
    return narrow(true, low > bound ? low : bound, target, target.mass ? 0 : int64_t(target.amount));
  }

 private:
  // What weighs less rounds to nothing.
  uint64_t key_of_least_mass(const Target& target) const {
    const float value = top() - float(target.bits + 1) / target.rate;
    return value == value ? uint64_t(::sycl::min(most_, ordered(value))) << 32 : 0;
  }

  // The shortest prefix, of the tokens or the groups with a key of at least `low`, that reaches the target; or one a
  // little longer, where it holds no more than `limit` items. A group has its largest token's value.
  Prefix narrow(bool tokens, uint64_t low, const Target& target, int64_t limit) {
    auto& bins = memory_.bins;
    Digit digit{low, uint64_t(most_) << 32 | 0xffffffffu, 0};
    uint64_t amount = target.amount;
    const float top = this->top();
    int64_t held = 0;
    for (bool begun = false;; begun = true) {
      digit.split();
      for (int i = team_.thread(); i < kBins; i += team_.size()) bins.count[i] = bins.low[i] = bins.high[i] = 0;
      team_.wait();
      const auto add = [&](uint64_t key, float value) {
        if (key < digit.low || key > digit.high) return;
        const int bin = int((digit.high - key) >> digit.shift);
        LocalCounter<uint32_t>(bins.count[bin]).fetch_add(1);
        if (!target.mass) return;
        const uint64_t mass = fixed(weight_of(value, top, target.rate), target.bits);
        const uint32_t part = uint32_t(mass);
        const uint32_t carry = LocalCounter<uint32_t>(bins.low[bin]).fetch_add(part) > ~part ? 1 : 0;
        if (const uint32_t rest = uint32_t(mass >> 32) + carry; rest != 0)
          LocalCounter<uint32_t>(bins.high[bin]).fetch_add(rest);
      };
      if (tokens)
        each_token(digit.low, add);
      else
        each_group(add);
      team_.wait();
      const Crossing end = cross(
          team_, kBins,
          [&](int i) { return target.mass ? uint64_t(bins.high[i]) << 32 | bins.low[i] : uint64_t(bins.count[i]); },
          [&](uint64_t) { return amount - 1; }, memory_.crossing);
      if (end.index < 0) return {low, 0, begun};
      const uint32_t inside = bins.count[end.index];
      uint32_t above = 0;
      for (int i = team_.thread(); i < end.index; i += team_.size()) above += bins.count[i];
      held += team_.sum(above);
      const bool several = digit.shift > 0;  // keys in a bin
      digit.enter(end.index, vocab_size_);
      // A bin that is small beside the rest costs less to list than to look into.
      const int64_t through = held + inside;
      const bool close = through <= limit && inside <= 32 + through / 4;
      team_.wait();
      if (close || inside == 1 || !several) return {digit.low, through, true};
      amount -= end.before;
    }
  }

  template <class Visit>
  void each_group(Visit visit) const {
    for (int g = team_.thread(); g < groups_; g += team_.size()) visit(order_key(tops_[g], g), tops_[g]);
  }

  template <class Visit>
  void each_token(uint64_t low, Visit visit) const {
    for (int g = team_.thread(); g < groups_; g += team_.size()) {
      if (order_key(tops_[g], g * kGroup) < low) continue;
      each_part(row_, vocab_size_, g, [&](int first, const float (&x)[kPart]) {
        for (int i = 0; i < kPart; ++i)
          if (first + i < vocab_size_ && ordered(x[i]) >= uint32_t(low >> 32))
            visit(order_key(x[i], first + i), x[i]);
      });
    }
  }

  void append(uint64_t key) {
    const uint32_t at = LocalCounter<uint32_t>(memory_.num_keys).fetch_add(1);
    if (at < uint32_t(kList)) memory_.keys[at] = key;
  }

  // Lists the tokens of the groups of a prefix of groups that are not below its last group's largest.
  int list_groups(uint64_t least) {
    if (team_.thread() == 0) memory_.num_groups = memory_.num_keys = 0;
    team_.wait();
    each_group([&](uint64_t key, float) {
      if (key < least) return;
      const uint32_t at = LocalCounter<uint32_t>(memory_.num_groups).fetch_add(1);
      if (at < uint32_t(kMaxGroups)) memory_.groups[at] = key_id(key);
    });
    team_.wait();
    const uint32_t floor = uint32_t(least >> 32);
    const int count = ::sycl::min(int(memory_.num_groups), kMaxGroups) * kGroup;
    for (int i = team_.thread(); i < count; i += team_.size()) {
      const int id = memory_.groups[i / kGroup] * kGroup + i % kGroup;
      if (id >= vocab_size_) continue;
      const float x = no_nan(widen(row_[id]));
      if (ordered(x) >= floor) append(order_key(x, id));
    }
    team_.wait();
    return int(memory_.num_keys);
  }

  int list_tokens(uint64_t least) {
    if (team_.thread() == 0) memory_.num_keys = 0;
    team_.wait();
    each_token(least, [&](uint64_t key, float) {
      if (key >= least) append(key);
    });
    team_.wait();
    return int(memory_.num_keys);
  }

  const Team& team_;
  const T* row_;
  const float* tops_;
  const int vocab_size_, groups_;
  RowMemory& memory_;
  uint32_t most_;
};

}  // namespace pydflash::sycl_backend
