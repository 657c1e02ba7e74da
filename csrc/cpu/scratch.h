// Working memory of one call: one part per thread, taken before the threads start.
#pragma once

#include <cstddef>
#include <new>

#include "cpu/cpu.h"
#include "cpu/crew.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

class Scratch {
 public:
  Scratch(int64_t bytes_per_thread, int threads)
      : part_(size_t(bytes_per_thread + 63) & ~size_t(63)),
        memory_(static_cast<char*>(::operator new(part_ * size_t(threads) + 64))) {}
  ~Scratch() { ::operator delete(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // A thread's part, on a cache line.
  char* part(int thread) const {
    char* aligned = memory_ + (-reinterpret_cast<uintptr_t>(memory_) & 63);
    return aligned + part_ * size_t(thread);
  }

 private:
  size_t part_;
  char* memory_;
};

// Takes `count` elements from the front of a part.
template <class T>
inline T* carve(char*& part, int64_t count) {
  T* taken = reinterpret_cast<T*>(part);
  part += (count * int64_t(sizeof(T)) + 63) & ~int64_t(63);
  return taken;
}

}  // namespace
}  // namespace pydflash::cpu::PYDFLASH_LEVEL
