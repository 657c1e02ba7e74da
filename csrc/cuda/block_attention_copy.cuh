// Tiles of rows on their way to shared memory: by tensor maps where the architecture has them, by cp.async before,
// element by element where rows do not start on 16 bytes.
#pragma once

#include "cuda/async.cuh"
#include "cuda/block_attention.cuh"

namespace pydflash::cuda {
namespace {

// A tile in shared memory is stored in slabs of 128 bytes of each row, the 16-byte chunks of a slab swizzled: no bank
// conflicts for eight rows of one chunk, and the layout of tensor maps and of wgmma.
template <int kRows>
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  return (chunk >> 3) * (kRows * 128) + row * 128 + (((chunk ^ row) & 7) << 4);
}

// A place in shared memory, for ordinary accesses and for instructions that take its address in 32 bits.
struct Place {
  char* pointer;
  uint32_t address;

  __device__ __forceinline__ Place operator+(int bytes) const { return {pointer + bytes, address + bytes}; }
};

// Of the first kThreads threads of a block, those that multiply.
template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Starts copying a tile of kDim columns from [batch, head, row] on; what lies outside the tensor becomes zero.
template <int kRows, int kDim, class T>
__device__ __forceinline__ void bulk_copy_tile(uint32_t tile, const CUtensorMap& map, int row, int head, int batch,
                                               uint32_t barrier) {
#pragma unroll
  for (int slab = 0; slab < kDim * int(sizeof(T)) / 128; ++slab)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(tile + slab * (kRows * 128)),
        "l"(&map), "r"(slab * (128 / int(sizeof(T)))), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}
#else
template <int kRows, int kDim, class T>
__device__ __forceinline__ void bulk_copy_tile(uint32_t, const CUtensorMap&, int, int, int, uint32_t) {}
#endif

__device__ __forceinline__ void copy_chunk(char* to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where the rows of a tile are: row r is slot r % n of head r / n, per_slot being 1 / n, or 0 for rows of one head.
template <class T>
struct RowsInMemory {
  const T* first;
  int64_t head_stride, slot_stride;
  float per_slot;
  int head_slots;

  __device__ __forceinline__ const T* at(int row) const {
    const int head = int((row + 0.5f) * per_slot);
    return first + head * head_stride + (row - head * head_slots) * slot_stride;
  }
};

// `rows` rows of `dim` elements to a tile whose other elements become zero, by the first kThreads threads.
template <int kRows, int kDim, int kThreads, class T>
__device__ __noinline__ void copy_tile(char* tile, RowsInMemory<T> from, int rows, int dim, bool aligned) {
  constexpr int kPer = 16 / sizeof(T), kChunks = kDim / kPer;
  if (!kBulkCopies && aligned) {
    static_assert(kThreads % kChunks == 0 && kRows * kChunks % kThreads == 0, "a thread keeps its column");
    const int chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int i = 0; i < kRows * kChunks / kThreads; ++i) {
      const int row = threadIdx.x / kChunks + i * (kThreads / kChunks);
      const bool present = row < rows && chunk * kPer < dim;
      copy_chunk(tile + tile_offset<kRows>(row, chunk), from.at(present ? row : 0) + (present ? chunk * kPer : 0),
                 present);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kDim; i += kThreads) {
    const int row = i / kDim, column = i % kDim;
    T* to = reinterpret_cast<T*>(tile + tile_offset<kRows>(row, column / kPer)) + column % kPer;
    *to = row < rows && column < dim ? from.at(row)[column] : T{};
  }
}

}  // namespace
}  // namespace pydflash::cuda
