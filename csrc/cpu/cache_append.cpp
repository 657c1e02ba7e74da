#include <cstring>

#include "cpu/cpu.h"
#include "cpu/crew.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {

void cache_append(const CacheAppendParams& p, Stream) {
  const int64_t size = p.element_size, row_bytes = p.head_dim * size;
  // Rows are copied in runs where they lie one after the other on both sides (a chain's always do).
  const bool dense = p.k_cache_stride[3] == p.head_dim && p.v_cache_stride[3] == p.head_dim &&
                     p.k_block_stride[3] == p.head_dim && p.v_block_stride[3] == p.head_dim;
  const int threads = threads_for(int64_t(p.layers) * p.entries * p.num_kv_heads * row_bytes, 1 << 20);
  in_shares(int64_t(p.layers) * p.batch, threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t layer = i / p.batch, b = i % p.batch;
      const int32_t* index = p.index + b * p.entries;
      int count = 0;
      while (count < p.entries && index[count] >= 0) ++count;
      const auto row = [&](const void* data, const int64_t* stride, int64_t head, int64_t at) {
        return static_cast<const char*>(data) +
               (layer * stride[0] + b * stride[1] + head * stride[2] + at * stride[3]) * size;
      };
      // In a ring only the last `capacity` rows survive; the others are not written at all.
      for (int n = count > p.capacity ? int(count - p.capacity) : 0; n < count;) {
        const int64_t to = (int64_t(p.lengths[b]) + n) % p.capacity;
        int64_t rows = 1;
        while (dense && n + rows < count && index[n + rows] == index[n] + rows && to + rows < p.capacity) ++rows;
        for (int h = 0; h < p.num_kv_heads; ++h) {
          memcpy(const_cast<char*>(row(p.k_cache, p.k_cache_stride, h, to)),
                 row(p.k_block, p.k_block_stride, h, index[n]), size_t(rows * row_bytes));
          memcpy(const_cast<char*>(row(p.v_cache, p.v_cache_stride, h, to)),
                 row(p.v_block, p.v_block_stride, h, index[n]), size_t(rows * row_bytes));
        }
        n += int(rows);
      }
    }
  });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
