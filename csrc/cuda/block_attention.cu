#include "cuda/block_attention.cuh"

namespace pydflash::cuda {

void block_attention(const BlockAttentionParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) { block_attention_of<decltype(type)>(p, stream); });
}

int64_t scratch_bytes(const BlockAttentionParams& p) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int64_t bytes = 0;
  by_dtype(p.dtype, [&](auto type) { bytes = block_attention_scratch<decltype(type)>(p, device); });
  return bytes;
}

}  // namespace pydflash::cuda
