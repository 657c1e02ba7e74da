// cache_append: rows of keys and values to the end of each sequence, moved in units of 2, 4 or 8 bytes.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// A work-group takes one head of one layer and sequence; the work-items are (row, unit of the row).
// Strides and `units`, the length of a row, count units.
// RTC common: CacheAppend<uint16_t>
// RTC common: CacheAppend<uint32_t>
// RTC common: CacheAppend<uint64_t>
template <class Unit>
struct CacheAppend {
  Unit *k_cache, *v_cache;
  const Unit *k_block, *v_block;
  Strides4 k_to, v_to, k_from, v_from;
  const int32_t *index, *lengths;
  int batch, num_kv_heads, entries, units;
  int64_t capacity;

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t group = int64_t(item.get_group(0));
    const int64_t head = group % num_kv_heads, b = group / num_kv_heads % batch, layer = group / num_kv_heads / batch;
    const int32_t* entry = index + b * entries;
    int count = 0;
    while (count < entries && entry[count] >= 0) ++count;
    const int32_t length = lengths[b];
    const Unit* k_rows = k_block + layer * k_from.a + b * k_from.b + head * k_from.c;
    const Unit* v_rows = v_block + layer * v_from.a + b * v_from.b + head * v_from.c;
    Unit* k = k_cache + layer * k_to.a + b * k_to.b + head * k_to.c;
    Unit* v = v_cache + layer * v_to.a + b * v_to.b + head * v_to.c;
    // In a ring only the last `capacity` rows survive; the others are not written at all.
    const int64_t skipped = count > capacity ? count - capacity : 0;
    const int64_t first = skipped * units + int64_t(item.get_local_id(0)), last = int64_t(count) * units;
    for (int64_t at = first; at < last; at += int64_t(item.get_local_range(0))) {
      const int n = int(at / units), unit = int(at % units);
      const int64_t from = entry[n], to = ring_row(length, n, capacity);
      k[to * k_to.d + unit] = k_rows[from * k_from.d + unit];
      v[to * v_to.d + unit] = v_rows[from * v_from.d + unit];
    }
  }
};

}  // namespace pydflash::sycl_backend
