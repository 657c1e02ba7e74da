// apply_penalties: a work-item makes one logit.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// RTC f32: ApplyPenalties<float>
// RTC bf16: ApplyPenalties<bfloat>
// RTC f16: ApplyPenalties<half>
template <class T>
struct ApplyPenalties {
  const T* logits;
  Strides2 stride;
  const int64_t *tokens, *visibility;
  int64_t visibility_stride;
  const int32_t *in_prompt, *counts;
  const float *bias, *repetition, *presence, *frequency;
  float* out;
  int slots, vocab_size;
  int64_t count;  // of outputs

  void operator()(::sycl::nd_item<1> item) const {
    const int64_t at = int64_t(item.get_global_id(0));
    if (at >= count) return;
    const int64_t v = at % vocab_size, index = at / vocab_size, b = index / slots, i = index % slots;
    const int64_t token = b * vocab_size + v;
    const int held =
        counts[token] + drafts_on_path(tokens + b * slots, slots, visibility[b * visibility_stride + i], v);
    out[at] = penalised(widen(logits[b * stride.a + i * stride.b + v]), in_prompt[token] != 0, held, repetition[b],
                        presence[b], frequency[b], bias[token]);
  }
};

}  // namespace pydflash::sycl_backend
