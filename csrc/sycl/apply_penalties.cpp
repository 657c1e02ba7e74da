#include "sycl/kernels/apply_penalties.hpp"
#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {

void apply_penalties(const ApplyPenaltiesParams& p, Stream stream) {
  const int64_t count = int64_t(p.batch) * p.slots * p.vocab_size;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<ApplyPenalties<T>>("apply_penalties", stream, groups_for(count), kThreads,
                              static_cast<const T*>(p.logits), Strides2{p.logits_stride[0], p.logits_stride[1]},
                              p.tokens, p.visibility, p.visibility_stride, p.in_prompt, p.counts, p.bias, p.repetition,
                              p.presence, p.frequency, p.out, p.slots, p.vocab_size, count);
  });
}

}  // namespace pydflash::sycl_backend
