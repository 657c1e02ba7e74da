// What the work-items of a group work out together: reductions, the end of a prefix, sorting.
#pragma once

#include "sycl/kernels/fixed.hpp"

namespace pydflash::sycl_backend {

// All members but thread() and size() are for the whole group.
class Team {
 public:
  explicit Team(::sycl::nd_item<1> item) : item_(item) {}

  int thread() const { return int(item_.get_local_id(0)); }
  int size() const { return int(item_.get_local_range(0)); }
  void wait() const { ::sycl::group_barrier(item_.get_group()); }

  template <class T>
  T largest(T x) const {
    return ::sycl::reduce_over_group(item_.get_group(), x, ::sycl::maximum<T>());
  }
  template <class T>
  T least(T x) const {
    return ::sycl::reduce_over_group(item_.get_group(), x, ::sycl::minimum<T>());
  }
  template <class T>
  T sum(T x) const {
    return ::sycl::reduce_over_group(item_.get_group(), x, ::sycl::plus<T>());
  }
  uint64_t sum_before(uint64_t x) const {
    return ::sycl::exclusive_scan_over_group(item_.get_group(), x, ::sycl::plus<uint64_t>());
  }

 private:
  ::sycl::nd_item<1> item_;
};

template <class T>
using LocalCounter = ::sycl::atomic_ref<T, ::sycl::memory_order::relaxed, ::sycl::memory_scope::work_group,
                                        ::sycl::access::address_space::local_space>;

struct Crossing {
  int index;  // -1 where the sum stays at the limit or below
  uint64_t before, total;
};

// The first of `count` items whose amount takes the sum beyond limit(total). Threads take neighbouring items, so
// amount(i) is called once or twice for each.
template <class Amount, class Limit>
Crossing cross(const Team& team, int count, Amount amount, Limit limit, Crossing& shared) {
  const int each = (count + team.size() - 1) / team.size();
  const int begin = ::sycl::min(team.thread() * each, count), end = ::sycl::min(begin + each, count);
  uint64_t sum = 0;
  for (int i = begin; i < end; ++i) sum += amount(i);
  uint64_t before = team.sum_before(sum);
  const uint64_t total = team.sum(sum), beyond = limit(total);
  if (total <= beyond) return {-1, 0, total};
  if (before <= beyond && beyond < before + sum) {
    int i = begin;
    for (uint64_t here; i < end - 1; ++i, before += here)
      if (here = amount(i); before + here > beyond) break;
    shared = {i, before, total};
  }
  team.wait();
  const Crossing found = shared;
  team.wait();
  return found;
}

// Sorts distinct keys from the largest to the smallest; `keys` has room for the next power of two.
inline void sort_descending(const Team& team, uint64_t* keys, int count) {
  const int thread = team.thread();
  if (count <= team.size()) {  // by counting what comes before
    const uint64_t key = thread < count ? keys[thread] : 0;
    int rank = 0;
    for (int i = 0; i < (thread < count ? count : 0); ++i) rank += keys[i] > key ? 1 : 0;
    team.wait();
    if (thread < count) keys[rank] = key;
    team.wait();
    return;
  }
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + thread; i < size; i += team.size()) keys[i] = 0;
  team.wait();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      for (int i = thread; i < size / 2; i += team.size()) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const uint64_t left = keys[a], right = keys[b];
        if ((left < right) == ((a & run) == 0)) keys[a] = right, keys[b] = left;
      }
      team.wait();
    }
  }
}

}  // namespace pydflash::sycl_backend
