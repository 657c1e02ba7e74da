#include "sycl/kernels/reject_sample.hpp"

#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {
namespace {

struct Workspace {
  float *tops, *sums;  // [batch, slots, groups], as masses
  uint64_t* masses;
  int* verdicts;  // [batch, slots], as what follows
  uint64_t *least, *total;
  float* top_floor;
};

Workspace carve_workspace(const RejectSampleParams& p, char*& part) {
  const int64_t count = int64_t(p.batch) * p.slots, groups = count * num_groups(p.vocab_size);
  const int64_t judged = p.draft_slots > 0 ? count : 0;
  Workspace w{};
  w.tops = carve<float>(part, groups);
  w.sums = carve<float>(part, groups);
  w.masses = carve<uint64_t>(part, groups);
  w.verdicts = carve<int>(part, count);
  w.least = carve<uint64_t>(part, judged);
  w.total = carve<uint64_t>(part, judged);
  w.top_floor = carve<float>(part, 2 * judged);
  return w;
}

template <class T>
void run(const RejectSampleParams& p, Stream stream) {
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  const T* logits = static_cast<const T*>(p.logits);
  const Strides2 stride{p.logits_stride[0], p.logits_stride[1]};
  const Strides2 draft_stride{p.draft_probs_stride[0], p.draft_probs_stride[1]};
  const int64_t count = int64_t(p.batch) * p.slots, groups = count * num_groups(p.vocab_size);
  launch<ScanRows<T>>("reject_sample", stream, groups_for(groups), kThreads, logits, stride, p.slots, p.vocab_size,
                      groups, p.temperature, w.tops, w.sums);
  launch<SettleRows<T>>("reject_sample", stream, count, kThreads, logits, stride, p.slots, p.vocab_size, w.tops,
                        w.sums, w.masses, p.tokens, p.parents, p.draft_probs, p.draft_ids, p.draft_slots,
                        p.num_candidates, draft_stride, p.temperature, p.top_p, p.min_p, p.top_k, p.seeds, p.starts,
                        w.verdicts, w.least, w.total, w.top_floor, Local<RowMemory>{1});
  launch<WalkSlots<T>>("reject_sample", stream, p.batch, kThreads, logits, stride, p.slots, p.vocab_size, w.tops,
                       w.sums, w.masses, p.tokens, p.parents, p.draft_probs, p.draft_ids, p.draft_slots,
                       p.num_candidates, draft_stride, p.temperature, p.seeds, p.starts, w.verdicts, w.least, w.total,
                       w.top_floor, p.index, p.num_accepted, p.bonus, Local<RowMemory>{1});
}

}  // namespace

int64_t scratch_bytes(const RejectSampleParams& p) {
  char* part = nullptr;
  carve_workspace(p, part);
  return part - static_cast<char*>(nullptr);
}

void reject_sample(const RejectSampleParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p, stream); });
}

}  // namespace pydflash::sycl_backend
