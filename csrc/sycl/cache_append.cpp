#include "sycl/kernels/cache_append.hpp"
#include "sycl/units.hpp"

namespace pydflash::sycl_backend {

void cache_append(const CacheAppendParams& p, Stream stream) {
  const auto fits = [&](int bytes) {
    const auto row = [&](const void* data, const int64_t* strides) {
      return in_units(bytes, data, p.element_size, p.head_dim, strides, 4);
    };
    return row(p.k_cache, p.k_cache_stride) && row(p.v_cache, p.v_cache_stride) && row(p.k_block, p.k_block_stride) &&
           row(p.v_block, p.v_block_stride);
  };
  by_unit(p.element_size, fits, [&](auto type) {
    using Unit = decltype(type);
    const int64_t per_unit = int64_t(sizeof(Unit)) / p.element_size;
    const auto in_units_of = [&](const int64_t* s) {
      return Strides4{s[0] / per_unit, s[1] / per_unit, s[2] / per_unit, s[3] / per_unit};
    };
    launch<CacheAppend<Unit>>(
        "cache_append", stream, int64_t(p.layers) * p.batch * p.num_kv_heads, 128, static_cast<Unit*>(p.k_cache),
        static_cast<Unit*>(p.v_cache), static_cast<const Unit*>(p.k_block), static_cast<const Unit*>(p.v_block),
        in_units_of(p.k_cache_stride), in_units_of(p.v_cache_stride), in_units_of(p.k_block_stride),
        in_units_of(p.v_block_stride), p.index, p.lengths, p.batch, p.num_kv_heads, p.entries,
        int(p.head_dim / per_unit), p.capacity);
  });
}

}  // namespace pydflash::sycl_backend
