#include "cuda/block_attention_launch.cuh"

namespace pydflash::cuda {

template void block_attention_of<float>(const BlockAttentionParams& p, Stream stream);
template int64_t block_attention_scratch<float>(const BlockAttentionParams& p, int device);

}  // namespace pydflash::cuda
