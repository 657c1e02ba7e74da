// path_select: the candidates of every slot, the lattice of edge scores, and the walk through it.
#pragma once

#include "sycl/kernels/candidates.hpp"

namespace pydflash::sycl_backend {

// A work-group chooses the candidates of one slot.
// RTC f32: ChooseCandidates<float>
// RTC bf16: ChooseCandidates<bfloat>
// RTC f16: ChooseCandidates<half>
template <class T>
struct ChooseCandidates {
  const T* logits;
  Strides2 stride;
  int slots, vocab_size, num_candidates;
  const float* tops;
  int64_t* candidates;  // [batch, slots, num_candidates], as the next
  float* values;        // their logits
  ::sycl::local_accessor<RowMemory, 1> memory;

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    const int64_t index = int64_t(item.get_group(0));
    RowMemory& local = memory[0];
    Candidates<T> row(team, Rows<T>{logits, stride, slots, vocab_size}.row(index),
                      tops + index * num_groups(vocab_size), vocab_size, local);
    Prefix prefix{};
    const int listed = row.collect({false, uint64_t(num_candidates), 0, 0}, prefix);
    sort_descending(team, local.keys, listed);
    for (int c = team.thread(); c < num_candidates; c += team.size()) {
      candidates[index * num_candidates + c] = key_id(local.keys[c]);
      values[index * num_candidates + c] = key_value(local.keys[c]);
    }
  }
};

constexpr int kSide = 16, kRanks = 128;  // a block of the lattice: kSide x kSide edges, kRanks of the sum at a time

struct LatticeTile {
  float left[kSide][kRanks + 1], right[kSide][kRanks + 1];
};

// scores[a][c] = logit[c] + sum_r predecessor[before_a][r] * hidden[r] * successor[candidate_c][r]. A work-group of
// kSide * kSide items fills one block of one slot.
// RTC f32: FillLattice<float>
// RTC bf16: FillLattice<bfloat>
// RTC f16: FillLattice<half>
template <class T>
struct FillLattice {
  const T *hidden, *predecessor, *successor;
  int slots, num_candidates, rank, codebook_size;
  const int64_t *anchors, *candidates;
  const float* values;
  float* scores;
  ::sycl::local_accessor<LatticeTile, 1> memory;

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    LatticeTile& tile = memory[0];
    const int blocks = (num_candidates + kSide - 1) / kSide, block = int(item.get_group(0) % size_t(blocks * blocks));
    const int64_t index = int64_t(item.get_group(0)) / (blocks * blocks), count = num_candidates;
    const int first_a = block / blocks * kSide, first_c = block % blocks * kSide;
    const int a = team.thread() / kSide, c = team.thread() % kSide;
    const bool start = index % slots == 0;  // all rows of the first slot start at the anchor
    const int64_t* ids = candidates + index * count;
    const int64_t anchor = ::sycl::clamp(anchors[index / slots], int64_t(0), int64_t(codebook_size - 1));
    float sum = 0;
    for (int first = 0; first < rank; first += kRanks) {
      const int width = ::sycl::min(rank - first, kRanks);
      for (int i = team.thread(); i < kSide * width; i += team.size()) {
        const int row = i / width, at = i % width, r = first + at;
        const int64_t from_a = ::sycl::min(first_a + row, num_candidates - 1);
        const int64_t from_c = ::sycl::min(first_c + row, num_candidates - 1);
        const int64_t before = start ? anchor : ids[from_a - count];
        tile.left[row][at] = widen(predecessor[before * rank + r]) * widen(hidden[index * rank + r]);
        tile.right[row][at] = widen(successor[ids[from_c] * rank + r]);
      }
      team.wait();
      for (int r = 0; r < width; ++r) sum = ::sycl::fma(tile.left[a][r], tile.right[c][r], sum);
      team.wait();
    }
    if (first_a + a < num_candidates && first_c + c < num_candidates)
      scores[(index * count + first_a + a) * count + first_c + c] = values[index * count + first_c + c] + sum;
  }
};

// The law of one row of scores, NaN counting as -inf.
struct ScoreLaw {
  const float* row;
  int count;
  float temperature;
  int bits;
  int best;
  float top;

  ScoreLaw(const float* scores, int num_candidates, float at_temperature)
      : row(scores), count(num_candidates), temperature(at_temperature), bits(unit_bits(num_candidates)), best(0),
        top(-kInfinity) {
    for (int c = 0; c < count; ++c)
      if (row[c] > top) top = row[c], best = c;
  }

  // A row without a finite score is certain of candidate 0.
  bool certain() const { return !(temperature > 0) || top == -kInfinity; }
  float weight(int c) const {
    return row[c] == top ? 1.0f : row[c] < top ? ::sycl::exp((row[c] - top) / temperature) : 0.0f;
  }
  uint64_t total() const {
    uint64_t sum = 0;
    for (int c = 0; c < count; ++c) sum += fixed(weight(c), bits);
    return sum;
  }
  int draw(float u) const {
    if (certain()) return best;
    const uint64_t beyond = share_of(bits_of(u), total());
    int c = 0;
    for (uint64_t sum = fixed(weight(0), bits); sum <= beyond; sum += fixed(weight(c), bits)) ++c;
    return c;
  }
};

// What follows every candidate: a work-item draws from one row of one slot's scores. Without a selector, and in the
// first slot, there is one row a slot.
// RTC common: ChooseEdges
struct ChooseEdges {
  const float* scores;  // [batch, slots, rows, num_candidates]
  int slots, rows, num_candidates;
  int64_t count;             // of all rows
  const float* temperature;  // or null
  const int64_t* seeds;
  const int32_t* starts;
  int* choices;  // [batch, slots, rows]

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int64_t index = at / rows, b = index / slots;
    const int slot = int(index % slots);
    if (slot == 0 && at % rows != 0) return;
    const float t = temperature != nullptr ? temperature[b] : 0.0f;
    const ScoreLaw law(scores + at * num_candidates, num_candidates, t);
    choices[at] = law.draw(t > 0 ? uniform(seeds[b], starts[b], Purpose::draft, uint32_t(slot + 1)) : 0.0f);
  }
};

// A work-group walks along the choices of one batch row, and writes the laws they were drawn from.
// RTC common: WalkLattice
struct WalkLattice {
  const float* scores;
  int slots, rows, num_candidates;
  const float* temperature;
  const int* choices;
  const int64_t* candidates;
  int64_t* tokens;
  float* probs;                        // [batch, slots, num_candidates] or null
  ::sycl::local_accessor<int, 1> walk;  // [slots + 1]: the candidate before each slot

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    const int64_t b = int64_t(item.get_group(0)), first = b * slots;
    if (team.thread() == 0) {
      walk[0] = 0;
      for (int slot = 0; slot < slots; ++slot)
        walk[slot + 1] = choices[(first + slot) * rows + (rows > 1 ? walk[slot] : 0)];
    }
    team.wait();
    const float t = temperature != nullptr ? temperature[b] : 0.0f;
    for (int slot = team.thread(); slot < slots; slot += team.size()) {
      const int64_t index = first + slot;
      const int chosen = walk[slot + 1];
      tokens[index] = candidates[index * num_candidates + chosen];
      if (probs == nullptr) continue;
      const ScoreLaw law(scores + (index * rows + (rows > 1 ? walk[slot] : 0)) * num_candidates, num_candidates, t);
      const bool certain = law.certain();
      const float total = certain ? 1.0f : from_fixed(law.total(), law.bits);
      for (int c = 0; c < num_candidates; ++c)
        probs[index * num_candidates + c] = certain ? (c == chosen ? 1.0f : 0.0f) : law.weight(c) / total;
    }
  }
};

}  // namespace pydflash::sycl_backend
