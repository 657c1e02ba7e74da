// Threads for the short loops of a forward. OpenMP waits for every thread at the end of a loop, so one that another
// program keeps from its core holds up all; and its threads either spin for long or wake slowly. Here the caller waits
// for those alone that have begun a share, and idle threads spin for about 0.1 ms before they sleep.
#pragma once

#include <omp.h>

#include <cstdint>

namespace pydflash::cpu {

// Calls run(context, begin, end, thread) for shares of [0, items) on the caller (thread 0) and up to threads - 1
// others. In a call from such a thread, or while another thread of the program is in one, the caller does all.
void share_out(int64_t items, int64_t share, int threads, void (*run)(void*, int64_t, int64_t, int), void* context);

// The threads that a loop of so much work should have, of which `least` is worth a second one.
static inline int threads_for(int64_t work, int64_t least) { return work > least ? omp_get_max_threads() : 1; }

// run(begin, end, thread) in shares that leave each thread several.
template <class Run>
static inline void in_shares(int64_t items, int threads, Run run) {
  constexpr int kShares = 8;  // per thread: one that is held up leaves its shares to others
  if (threads <= 1 || items <= 1) {
    if (items > 0) run(int64_t(0), items, 0);
    return;
  }
  const int64_t share = items / (int64_t(kShares) * threads);
  const auto call = [](void* context, int64_t begin, int64_t end, int thread) {
    (*static_cast<Run*>(context))(begin, end, thread);
  };
  share_out(items, share < 1 ? 1 : share, threads, call, &run);
}

}  // namespace pydflash::cpu
