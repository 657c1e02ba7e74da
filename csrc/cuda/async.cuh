// Barriers in shared memory and copies by tensor maps that complete on them.
#pragma once

#include <cuda.h>

#include "cuda/cuda.cuh"

namespace pydflash::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return uint32_t(__cvta_generic_to_shared(pointer));
}

// Makes ordinary stores to shared memory visible to the copy engine and to wgmma, once a barrier has followed.
__device__ __forceinline__ void fence_async() {
  if constexpr (kBulkCopies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barriers in shared memory. A phase ends when `count` have arrived and the bytes that they expect have come.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
  if constexpr (kBulkCopies)
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
#else
__device__ __forceinline__ void arrive(uint32_t) {}
__device__ __forceinline__ void arrive_expecting(uint32_t, int) {}
__device__ __forceinline__ void wait_for_phase(uint32_t, unsigned) {}
__device__ __forceinline__ void prefetch_map(const CUtensorMap&) {}
#endif

}  // namespace
}  // namespace pydflash::cuda
