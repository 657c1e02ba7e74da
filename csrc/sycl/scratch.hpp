// Parts of an op's scratch memory.
#pragma once

#include <cstdint>

#include "sycl/kernels/candidates.hpp"
#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

// Takes `count` elements from the front of scratch memory; with a null pointer it only counts.
template <class T>
T* carve(char*& part, int64_t count) {
  T* taken = reinterpret_cast<T*>(part);
  part += (count * int64_t(sizeof(T)) + 255) & ~int64_t(255);
  return taken;
}

constexpr int kThreads = 256;  // of a work-group, where nothing else is said

inline int64_t groups_for(int64_t items) { return (items + kThreads - 1) / kThreads; }

}  // namespace pydflash::sycl_backend
