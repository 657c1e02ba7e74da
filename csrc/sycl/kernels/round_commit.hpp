// round_commit: the numbers of a sequence and the features of its accepted slots.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// A work-group takes one entry of one sequence, that of entry 0 the sequence's numbers too. `units` is the length of
// a row of features, which the strides count as well.
// RTC common: RoundCommit<uint16_t>
// RTC common: RoundCommit<uint32_t>
// RTC common: RoundCommit<uint64_t>
template <class Unit>
struct RoundCommit {
  const int64_t* tokens;
  const int32_t *index, *num_accepted;
  const int64_t* bonus;
  const int32_t* active;
  const Unit* features_in;  // null where there are none
  Unit* features_out;
  Strides2 features_stride;
  int64_t* anchors;
  int32_t *lengths, *starts, *counts;
  int64_t* record;
  int slots, units, entries;  // entries: slots with features, else 1

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t n = int64_t(item.get_group(0)) % entries, b = int64_t(item.get_group(0)) / entries;
    const int first = int(item.get_local_id(0)), step = int(item.get_local_range(0));
    // Clamped: what the host could not check must not be read or written outside.
    const int accepted = ::sycl::min(num_accepted[b], slots - 1);
    const bool live = active[b] != 0;
    if (n == 0) commit(b, live ? accepted + 1 : 0, first, step);
    if (features_in == nullptr || !live || n > accepted) return;
    const Unit* from = features_in + b * features_stride.a + in_block(index[b * slots + n]) * features_stride.b;
    Unit* to = features_out + (b * slots + n) * units;
    for (int unit = first; unit < units; unit += step) to[unit] = from[unit];
  }

  int in_block(int slot) const { return ::sycl::max(0, ::sycl::min(slot, slots - 1)); }

  void commit(int64_t b, int total, int first, int step) const {
    const int64_t* token = tokens + b * slots;
    int64_t* row = record + b * (slots + 1);
    for (int n = first; n < slots; n += step)
      row[n] = n + 1 < total ? token[in_block(index[b * slots + n + 1])] : n + 1 == total ? bonus[b] : -1;
    if (first > 0) return;
    row[slots] = total;
    counts[b] = total;
    if (total == 0) return;
    anchors[b] = bonus[b];
    lengths[b] += total;
    starts[b] += total;
  }
};

}  // namespace pydflash::sycl_backend
