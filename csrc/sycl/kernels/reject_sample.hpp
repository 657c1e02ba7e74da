// reject_sample: what every row of logits draws, or whether it accepts its draft, and the walk down the slots.
#pragma once

#include "sycl/kernels/law.hpp"

namespace pydflash::sycl_backend {

constexpr int kAccepted = -1, kRefused = -2;  // verdicts on a row's draft; others are the token drawn

// q of one draft slot: over the whole vocabulary, or over `count` ids where `ids` is given.
struct DraftRow {
  const float* probs;
  const int64_t* ids;
  int count;

  // q(id); a NaN stays one.
  float at(int64_t id) const {
    if (ids == nullptr) return probs[id];
    float share = 0;
    for (int c = 0; c < count; ++c)
      if (ids[c] == id) share += probs[c];
    return share;
  }

  int group_of(int c, int vocab_size) const {
    const int64_t id = ids[c];
    return id >= 0 && id < vocab_size ? int(id) / kGroup : -1;
  }

  // The group of candidate c of a sparse q, or -1 where an earlier candidate lies there or c nowhere.
  int group_opened(int c, int vocab_size) const {
    const int group = group_of(c, vocab_size);
    for (int other = 0; other < c; ++other)
      if (group_of(other, vocab_size) == group) return -1;
    return group;
  }

  // q of the tokens from `first` on.
  void load(int first, int vocab_size, float (&share)[kPart]) const {
    for (int i = 0; i < kPart; ++i) share[i] = ids == nullptr && first + i < vocab_size ? probs[first + i] : 0.0f;
    for (int c = 0; c < (ids == nullptr ? 0 : count); ++c)
      for (int i = 0; i < kPart; ++i)
        if (ids[c] == first + i && first + i < vocab_size) share[i] += probs[c];
  }
};

struct DraftRows {
  const float* probs;
  const int64_t* ids;
  int slots, candidates;
  Strides2 stride;

  DraftRow at(int64_t b, int slot) const {
    return {probs + b * stride.a + slot * stride.b, ids == nullptr ? nullptr : ids + (b * slots + slot) * candidates,
            candidates};
  }
};

// How many slots lie before a slot on its path, or -1 where its parents lead nowhere.
inline int depth_of(const int32_t* parents, int slot) {
  if (parents == nullptr) return slot;
  int depth = 0;
  for (; slot > 0; ++depth) {
    const int parent = parents[slot];
    if (parent < 0 || parent >= slot) return -1;
    slot = parent;
  }
  return depth;
}

// A work-group settles one row. Of rows whose draft is judged by q it leaves the law, for the residual.
// RTC f32: SettleRows<float>
// RTC bf16: SettleRows<bfloat>
// RTC f16: SettleRows<half>
template <class T>
struct SettleRows {
  const T* logits;
  Strides2 stride;
  int slots, vocab_size;
  const float *tops, *sums;
  uint64_t* masses;
  const int64_t* tokens;
  const int32_t* parents;
  const float* draft_probs;
  const int64_t* draft_ids;
  int draft_slots, num_candidates;
  Strides2 draft_stride;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t* seeds;
  const int32_t* starts;
  int* verdicts;
  uint64_t *least, *total;
  float* top_floor;  // [rows, 2]
  ::sycl::local_accessor<RowMemory, 1> memory;

  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    const int64_t index = int64_t(item.get_group(0));
    const int verdict = settle(team, index);
    if (team.thread() == 0) verdicts[index] = verdict;
  }

 private:
  int settle(const Team& team, int64_t index) const {
    const int64_t b = index / slots, groups = num_groups(vocab_size);
    const int slot = int(index % slots);
    const T* row = Rows<T>{logits, stride, slots, vocab_size}.row(index);
    RowLaw<T> law(team, row, {tops + index * groups, sums + index * groups, masses + index * groups}, vocab_size,
                  memory[0]);
    if (!(temperature[b] > 0)) return law.argmax();
    const int depth = depth_of(parents == nullptr ? nullptr : parents + b * slots, slot);
    if (depth < 0) return 0;
    const int64_t draft = slot < draft_slots ? tokens[index + 1] : -1;
    const bool judged = draft >= 0, known = judged && draft < vocab_size;
    const float u = uniform(seeds[b], int64_t(starts[b]) + depth + 1, judged ? Purpose::accept : Purpose::target);
    const uint64_t mass = law.filter({temperature[b], top_p[b], min_p[b], top_k[b]});
    if (!judged) return ::sycl::max(law.locate(bits_of(u)), 0);
    const Law& found = law.law();
    if (team.thread() == 0) {
      least[index] = found.least, total[index] = mass;
      top_floor[2 * index] = found.top, top_floor[2 * index + 1] = found.floor;
    }
    if (!known) return kRefused;
    const DraftRows q{draft_probs, draft_ids, draft_slots, num_candidates, draft_stride};
    const float share = q.at(b, slot).at(draft), weight = found.weight(no_nan(widen(row[draft])), int(draft));
    return u * (share < 0 ? 0.0f : share) * from_fixed(mass, law.bits()) < weight ? kAccepted : kRefused;
  }
};

// A work-group walks down the slots of a batch row.
// RTC f32: WalkSlots<float>
// RTC bf16: WalkSlots<bfloat>
// RTC f16: WalkSlots<half>
template <class T>
struct WalkSlots {
  const T* logits;
  Strides2 stride;
  int slots, vocab_size;
  const float *tops, *sums;
  uint64_t* masses;
  const int64_t* tokens;
  const int32_t* parents;
  const float* draft_probs;
  const int64_t* draft_ids;
  int draft_slots, num_candidates;
  Strides2 draft_stride;
  const float* temperature;
  const int64_t* seeds;
  const int32_t* starts;
  const int* verdicts;
  const uint64_t *least, *total;
  const float* top_floor;
  int32_t *index, *num_accepted;
  int64_t* bonus;
  ::sycl::local_accessor<RowMemory, 1> memory;

  // What steers the walk is the same in all work-items.
  void operator()(::sycl::nd_item<1> item) const {
    const Team team(item);
    const int64_t b = int64_t(item.get_group(0)), base = b * slots;
    for (int i = team.thread(); i < slots; i += team.size()) index[base + i] = i == 0 ? 0 : -1;
    team.wait();
    int slot = 0, depth = 0;
    for (;;) {
      if (parents == nullptr) {
        const int run = accepted_run(team, base, slot);
        for (int i = team.thread(); i < run; i += team.size()) index[base + depth + 1 + i] = slot + 1 + i;
        slot += run, depth += run;
      }
      int token = verdicts[base + slot], next = slot + 1;
      if (token == kRefused) {  // a child beside the refused draft may carry what is drawn now
        token = draw_residual(team, b, slot, depth);
        next = child_of(team, base, slot, slot + 2, token);
      } else if (token != kAccepted) {
        next = child_of(team, base, slot, slot + 1, token);
      }
      if (next >= slots) {
        if (team.thread() == 0) num_accepted[b] = depth, bonus[b] = token;
        return;
      }
      slot = next, ++depth;
      if (team.thread() == 0) index[base + depth] = slot;
    }
  }

 private:
  // The first slot from `first` on that continues `slot` with `token`, or `slots`.
  int child_of(const Team& team, int64_t base, int slot, int first, int token) const {
    const int end = parents == nullptr ? ::sycl::min(slot + 2, slots) : slots;
    int child = slots;
    for (int i = first + team.thread(); i < end; i += team.size())
      if (tokens[base + i] == token && (parents == nullptr || parents[base + i] == slot))
        child = ::sycl::min(child, i);
    return team.least(child);
  }

  // How many drafts of a chain are accepted behind `slot`.
  int accepted_run(const Team& team, int64_t base, int slot) const {
    int end = slots - 1;
    for (int i = slot + team.thread(); i < slots - 1; i += team.size()) {
      const int verdict = verdicts[base + i];
      if (verdict != kAccepted && (verdict < 0 || tokens[base + i + 1] != verdict)) end = ::sycl::min(end, i);
    }
    return team.least(end) - slot;
  }

  // A draw from max(p - q, 0) of a row, in units of weight; from p itself where nothing is left of it.
  int draw_residual(const Team& team, int64_t b, int slot, int depth) const {
    const int64_t row = b * slots + slot, groups = num_groups(vocab_size);
    const RowParts parts{tops + row * groups, sums + row * groups, masses + row * groups};
    RowLaw<T> law(team, Rows<T>{logits, stride, slots, vocab_size}.row(row), parts, vocab_size, memory[0]);
    law.set_law({top_floor[2 * row], rate_of(temperature[b]), top_floor[2 * row + 1], least[row]});
    const float mass = from_fixed(total[row], law.bits());
    const auto taken = [mass](float share) { return share > 0 ? share * mass : 0.0f; };  // NaN takes nothing
    const DraftRow q = DraftRows{draft_probs, draft_ids, draft_slots, num_candidates, draft_stride}.at(b, slot);
    const auto rest_of = [&](int group) {
      return law.mass_of(group, [&](int first, float (&weights)[kPart]) {
        float share[kPart];
        q.load(first, vocab_size, share);
        for (int i = 0; i < kPart; ++i) {
          const float rest = weights[i] - taken(share[i]);
          weights[i] = rest > 0 ? rest : 0.0f;
        }
      });
    };
    if (q.ids == nullptr) {
      law.leave(rest_of);
    } else {  // a group without candidates keeps its mass
      for (int c = team.thread(); c < q.count; c += team.size())
        if (const int group = q.group_opened(c, vocab_size); group >= 0) parts.masses[group] = rest_of(group);
      team.wait();
    }
    const uint32_t u = bits_of(uniform(seeds[b], int64_t(starts[b]) + depth + 1, Purpose::residual));
    const int id = law.locate(u, [&](int id) { return taken(q.at(id)); });
    if (id >= 0) return id;
    law.measure();
    return ::sycl::max(law.locate(u), 0);
  }
};

}  // namespace pydflash::sycl_backend
