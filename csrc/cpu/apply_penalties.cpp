#include "cpu/crew.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// The whole row without its drafts, then the tokens of the drafts on its path anew.
template <class T>
void slot(const ApplyPenaltiesParams& p, int b, int i) {
  const T* logits = static_cast<const T*>(p.logits) + b * p.logits_stride[0] + i * p.logits_stride[1];
  const int64_t row = int64_t(b) * p.vocab_size;
  const int32_t *in_prompt = p.in_prompt + row, *counts = p.counts + row;
  const float *bias = p.bias + row, repetition = p.repetition[b], presence = p.presence[b], frequency = p.frequency[b];
  float* __restrict out = p.out + (int64_t(b) * p.slots + i) * p.vocab_size;
  for (int v = 0; v < p.vocab_size; ++v)
    out[v] = penalised(to_float(logits[v]), in_prompt[v] != 0, counts[v], repetition, presence, frequency, bias[v]);
  const int64_t *tokens = p.tokens + int64_t(b) * p.slots, sees = p.visibility[b * p.visibility_stride + i];
  for (int j = 1; j < p.slots; ++j) {
    const int64_t v = tokens[j];
    if ((sees >> j & 1) == 0 || v < 0 || v >= p.vocab_size) continue;
    const int count = int(uint32_t(counts[v]) + uint32_t(drafts_on_path(tokens, p.slots, sees, v)));  // of any value
    out[v] = penalised(to_float(logits[v]), in_prompt[v] != 0, count, repetition, presence, frequency, bias[v]);
  }
}

template <class T>
void run(const ApplyPenaltiesParams& p) {
  const int64_t items = int64_t(p.batch) * p.slots;
  in_shares(items, threads_for(items * p.vocab_size, 1 << 15), [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) slot<T>(p, int(at / p.slots), int(at % p.slots));
  });
}

}  // namespace

void apply_penalties(const ApplyPenaltiesParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
