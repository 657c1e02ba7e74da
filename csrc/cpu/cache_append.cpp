#include "cpu/cpu.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {

void cache_append(const CacheAppendParams& p, Stream) {
  const int64_t size = p.element_size;
  const size_t row_bytes = size_t(p.head_dim) * size;
#pragma omp parallel for collapse(2) if (int64_t(p.layers) * p.entries * p.num_kv_heads * row_bytes > 1 << 18)
  for (int layer = 0; layer < p.layers; ++layer) {
    for (int b = 0; b < p.batch; ++b) {
      const int32_t* index = p.index + int64_t(b) * p.entries;
      int count = 0;
      while (count < p.entries && index[count] >= 0) ++count;
      // In a ring only the last `capacity` rows survive; writing the others would race with them.
      const int first = count > p.capacity ? int(count - p.capacity) : 0;
      for (int h = 0; h < p.num_kv_heads; ++h) {
        const auto row = [&](const void* data, const int64_t* stride, int64_t at) {
          return static_cast<const char*>(data) +
                 (layer * stride[0] + b * stride[1] + h * stride[2] + at * stride[3]) * size;
        };
        for (int n = first; n < count; ++n) {
          const int64_t to = (int64_t(p.lengths[b]) + n) % p.capacity;
          memcpy(const_cast<char*>(row(p.k_cache, p.k_cache_stride, to)),
                 row(p.k_block, p.k_block_stride, index[n]), row_bytes);
          memcpy(const_cast<char*>(row(p.v_cache, p.v_cache_stride, to)),
                 row(p.v_block, p.v_block_stride, index[n]), row_bytes);
        }
      }
    }
  }
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
