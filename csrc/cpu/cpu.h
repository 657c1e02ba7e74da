// Shared by the CPU kernels. Each kernel file is compiled once per level; what it defines lives in the namespace
// PYDFLASH_LEVEL or is internal, so that no wide instruction leaks into code another level calls.
#pragma once

#include <cmath>

#include "kernels.h"
#include "numeric.h"

#if !defined(PYDFLASH_LEVEL_avx2)
#define PYDFLASH_LEVEL_avx2 0
#endif
#if !defined(PYDFLASH_LEVEL_avx512)
#define PYDFLASH_LEVEL_avx512 0
#endif

namespace pydflash::cpu {

// Calls run.operator()<T>() for the storage type of dtype.
template <class Run>
static inline void by_dtype(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32: return run(float{});
    case DType::bf16: return run(bf16{});
    case DType::f16: return run(f16{});
  }
}

}  // namespace pydflash::cpu
