// The target's law of one row of logits: temperature, top-k, top-p, min-p and draws. A work-group has a row. Every
// filter keeps a prefix of the order, so the least key kept and the least weight kept describe them.
#pragma once

#include "sycl/kernels/candidates.hpp"

namespace pydflash::sycl_backend {

// Weights are e^((x - top) / temperature), so the largest is 1.
struct Law {
  float top, rate;
  float floor;     // the least weight kept
  uint64_t least;  // the least order_key kept

  float weight(float x, int id) const {
    const float w = weight_of(x, top, rate);
    return order_key(x, id) >= least && w >= floor ? w : 0.0f;
  }
};

struct Filters {
  float temperature, top_p, min_p;
  int top_k;  // 0 = off
};

// What a row's law is worked out in, as ScanRows left it; the masses of groups are in units of 2^-bits.
struct RowParts {
  const float *tops, *sums;
  uint64_t* masses;
};

template <class T>
class RowLaw {
 public:
  RowLaw(const Team& team, const T* row, RowParts parts, int vocab_size, RowMemory& memory)
      : team_(team), row_(row), parts_(parts), vocab_size_(vocab_size), groups_(num_groups(vocab_size)),
        bits_(unit_bits(vocab_size)), memory_(memory) {}

  int bits() const { return bits_; }
  const Law& law() const { return law_; }
  void set_law(const Law& law) { law_ = law; }

  int argmax() {
    const Candidates<T> candidates(team_, row_, parts_.tops, vocab_size_, memory_);
    const float top = candidates.top();
    int first = groups_ - 1;
    for (int g = team_.thread(); g < groups_; g += team_.size())
      if (parts_.tops[g] == top) first = ::sycl::min(first, g);
    first = team_.least(first) * kGroup;
    int id = vocab_size_ - 1;
    for (int i = team_.thread(); i < kGroup && first + i < vocab_size_; i += team_.size())
      if (no_nan(widen(row_[first + i])) == top) id = ::sycl::min(id, first + i);
    return team_.least(id);
  }

  // Filters, and leaves the masses of all groups; returns their sum.
  uint64_t filter(const Filters& filters) {
    Candidates<T> candidates(team_, row_, parts_.tops, vocab_size_, memory_);
    law_ = {candidates.top(), rate_of(filters.temperature), filters.min_p < 1.0f ? filters.min_p : 1.0f, 0};
    const bool limited = filters.top_k > 0 && filters.top_k < vocab_size_, nucleus = filters.top_p < 1.0f;
    if (law_.top == -kInfinity) {
      law_.least = order_key(-kInfinity, 0);  // certain of id 0
    } else if (limited || nucleus) {
      cut(candidates, filters, limited, nucleus);
    } else if (!(filters.min_p > 0)) {
      return leave([&](int g) { return whole_mass(g); });
    }
    return measure();
  }

  // The masses of all groups, as the filters leave them.
  uint64_t measure() {
    return leave([&](int g) { return mass_of(g, [](int, float (&)[kPart]) {}); });
  }

  // Replaces the masses by mass(group), and returns their sum.
  template <class Mass>
  uint64_t leave(Mass mass) {
    uint64_t sum = 0;
    for (int g = team_.thread(); g < groups_; g += team_.size()) {
      const uint64_t here = mass(g);
      parts_.masses[g] = here;
      sum += here;
    }
    team_.wait();
    return team_.sum(sum);
  }

  // For one work-item: the mass of a group after change(first id, weights) of its parts.
  template <class Change>
  uint64_t mass_of(int group, Change change) const {
    if (!(law_.weight(parts_.tops[group], group * kGroup) > 0)) return 0;
    uint64_t sum = 0;
    each_part(row_, vocab_size_, group, [&](int first, float (&x)[kPart]) {
      for (int i = 0; i < kPart; ++i) x[i] = first + i < vocab_size_ ? law_.weight(x[i], first + i) : 0.0f;
      change(first, x);
      for (int i = 0; i < kPart; ++i) sum += fixed(x[i], bits_);
    });
    return sum;
  }

  // The first id whose cumulative weight, less taken(id), exceeds u * total, or -1 where there is no mass; the masses
  // must agree.
  template <class Taken>
  int locate(uint32_t u, Taken taken) {
    const auto beyond = [u](uint64_t total) { return share_of(u, total); };
    const Crossing group = cross(team_, groups_, [&](int g) { return parts_.masses[g]; }, beyond, memory_.crossing);
    if (group.index < 0) return -1;
    const int first = group.index * kGroup;
    for (int i = team_.thread(); i < kGroup; i += team_.size()) {
      const int id = first + i;
      const float w = id < vocab_size_ ? law_.weight(no_nan(widen(row_[id])), id) - taken(id) : 0.0f;
      memory_.weights[i] = w > 0 ? w : 0.0f;
    }
    team_.wait();
    // The last of positive weight, where rounding leaves the threshold just beyond the group.
    const uint64_t rest = share_of(u, group.total) - group.before;
    int chosen = 0;
    uint64_t sum = 0;
    for (int i = 0; i < kGroup && sum <= rest; ++i) {
      if (!(memory_.weights[i] > 0)) continue;
      sum += fixed(memory_.weights[i], bits_);
      chosen = i;
    }
    team_.wait();
    return first + chosen;
  }
  int locate(uint32_t u) {
    return locate(u, [](int) { return 0.0f; });
  }

 private:
  // Of a group without filters.
  uint64_t whole_mass(int g) const {
    return fixed(parts_.sums[g] * weight_of(parts_.tops[g], law_.top, law_.rate), bits_);
  }

  // Top-k, and top-p of what it leaves.
  void cut(Candidates<T>& candidates, const Filters& filters, bool limited, bool nucleus) {
    uint64_t whole = 0;
    if (!limited) {
      for (int g = team_.thread(); g < groups_; g += team_.size()) whole += whole_mass(g);
      whole = team_.sum(whole);
    }
    Prefix prefix{};
    const Target target = limited ? Target{false, uint64_t(filters.top_k), 0, 0}
                                  : Target{true, portion_of(filters.top_p, whole), law_.rate, bits_};
    if (limited && filters.top_k > kList) {
      prefix = candidates.first(target, 0);
      if (nucleus) prefix = cut_inside(candidates, prefix, filters.top_p);
    } else if (const int listed = candidates.collect(target, prefix); listed > 0) {
      sort_descending(team_, memory_.keys, listed);
      int kept = limited ? ::sycl::min(filters.top_k, listed) : listed;
      if (nucleus) {
        const Crossing end = cross(
            team_, kept,
            [&](int i) { return fixed(weight_of(key_value(memory_.keys[i]), law_.top, law_.rate), bits_); },
            [&](uint64_t total) { return portion_of(filters.top_p, limited ? total : whole) - 1; }, memory_.crossing);
        kept = end.index < 0 ? kept : end.index + 1;
      }
      prefix = {memory_.keys[kept - 1], kept, true};
      team_.wait();
    }
    if (prefix.found) law_.least = prefix.least;
  }

  Prefix cut_inside(Candidates<T>& candidates, const Prefix& prefix, float top_p) {
    const Law whole = law_;
    law_.least = prefix.least, law_.floor = 0;
    const uint64_t total = measure();
    law_ = whole;
    const Prefix inside = candidates.first({true, portion_of(top_p, total), law_.rate, bits_}, prefix.least);
    return inside.found ? inside : prefix;
  }

  const Team& team_;
  const T* row_;
  const RowParts parts_;
  const int vocab_size_, groups_, bits_;
  RowMemory& memory_;
  Law law_{};
};

}  // namespace pydflash::sycl_backend
