// Moving rows in the widest units that their addresses, lengths and strides allow.
#pragma once

#include <cstdint>

#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {

// Whether rows of `size` elements can be moved in units of `bytes`.
inline bool in_units(int bytes, const void* data, int element_size, int64_t size, const int64_t* strides, int count) {
  bool fits = reinterpret_cast<uintptr_t>(data) % uintptr_t(bytes) == 0 && size * element_size % bytes == 0;
  for (int i = 0; i < count; ++i) fits = fits && strides[i] * element_size % bytes == 0;
  return fits;
}

// Calls run(Unit{}) with the widest unit for which fits(bytes) holds, else with the element's own.
template <class Fits, class Run>
void by_unit(int element_size, Fits fits, Run run) {
  if (fits(8)) return run(uint64_t{});
  return element_size == 4 || fits(4) ? run(uint32_t{}) : run(uint16_t{});
}

}  // namespace pydflash::sycl_backend
