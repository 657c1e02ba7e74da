#include "cpu/crew.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace pydflash::cpu {
namespace {

constexpr int kSpins = 2000;  // of some 50 ns

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  int64_t items, share;
  int threads;
  void (*run)(void*, int64_t, int64_t, int);
  void* context;
  std::atomic<int64_t> next{0};

  void work(int thread) {
    for (int64_t begin; (begin = next.fetch_add(share, std::memory_order_relaxed)) < items;)
      run(context, begin, std::min(begin + share, items), thread);
  }
};

thread_local bool inside = false;

class Crew {
 public:
  void run(Job& job) {
    std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
    if (inside || !mine.owns_lock()) return job.work(0);
    inside = true;
    hire(job.threads - 1);
    want(job.threads);
    job_.store(&job);
    call_.fetch_add(1);
    if (asleep_.load() > 0) {
      {
        std::lock_guard<std::mutex> lock(sleep_);
      }  // who counts as asleep and has seen no call is waiting by now
      wake_.notify_all();
    }
    job.work(0);
    job_.store(nullptr);
    for (int spins = 0; working_.load() > 0; ++spins) spins < kSpins ? pause() : std::this_thread::yield();
    inside = false;
  }

 private:
  void hire(int wanted) {
    try {
      for (; hired_ < wanted; ++hired_) std::thread(&Crew::serve, this, hired_ + 1, call_.load()).detach();
    } catch (const std::system_error&) {  // no more threads to be had: those there are do the work
    }
  }

  // Threads of an earlier, larger call would wake at each call and take the cores of those that have work.
  void want(int threads) {
    if (wanted_.load() == threads) return;
    {
      std::lock_guard<std::mutex> lock(sleep_);
      wanted_.store(threads);
    }
    spare_.notify_all();
  }

  void serve(int thread, uint64_t seen) {
    inside = true;
    for (;;) {
      for (int spins = 0; thread >= wanted_.load() || call_.load(std::memory_order_acquire) == seen; ++spins) {
        const bool spare = thread >= wanted_.load();
        if (spins < kSpins && !spare) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(sleep_);
        if (spare) {
          spare_.wait(lock, [&] { return thread < wanted_.load(); });
          continue;
        }
        asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return call_.load() != seen; });
        asleep_.fetch_sub(1);
      }
      seen = call_.load();
      // Counted before the job is read, so that its owner waits for those that have read it.
      working_.fetch_add(1);
      Job* job = job_.load();
      if (job != nullptr && thread < job->threads) job->work(thread);
      working_.fetch_sub(1);
    }
  }

  std::mutex caller_, sleep_;
  std::condition_variable wake_, spare_;
  alignas(64) std::atomic<uint64_t> call_{0};
  alignas(64) std::atomic<Job*> job_{nullptr};
  alignas(64) std::atomic<int> working_{0};
  std::atomic<int> asleep_{0}, wanted_{0};
  int hired_ = 0;
};

// Never destroyed: its threads outlive static objects. A child of fork has none of them and begins anew.
std::atomic<Crew*> crew{nullptr};

Crew& the_crew() {
  static std::once_flag once;
  std::call_once(once, [] {
    crew = new Crew;
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, [] { crew = new Crew, inside = false; });
#endif
  });
  return *crew.load();
}

}  // namespace

void share_out(int64_t items, int64_t share, int threads, void (*run)(void*, int64_t, int64_t, int), void* context) {
  Job job{items, share, threads, run, context};
  the_crew().run(job);
}

}  // namespace pydflash::cpu
