#include "sycl/kernels/path_select.hpp"

#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {
namespace {

struct Workspace {
  float *tops, *values;  // [batch, slots, groups]; [batch, slots, candidates], or the scores themselves
  int* choices;          // [batch, slots, rows]
};

Workspace carve_workspace(const PathSelectParams& p, char*& part) {
  const int64_t count = int64_t(p.batch) * p.slots;
  Workspace w{};
  w.tops = carve<float>(part, count * num_groups(p.vocab_size));
  w.values = p.rank > 0 ? carve<float>(part, count * p.num_candidates) : p.scores;
  w.choices = carve<int>(part, count * (p.rank > 0 ? p.num_candidates : 1));
  return w;
}

template <class T>
void fill(const PathSelectParams& p, const Workspace& w, Stream stream) {
  const int64_t blocks = (p.num_candidates + kSide - 1) / kSide;
  launch<FillLattice<T>>("path_select", stream, int64_t(p.batch) * p.slots * blocks * blocks, kSide * kSide,
                         static_cast<const T*>(p.hidden), static_cast<const T*>(p.predecessor),
                         static_cast<const T*>(p.successor), p.slots, p.num_candidates, p.rank, p.codebook_size,
                         p.anchors,
                         p.candidates, w.values, p.scores, Local<LatticeTile>{1});
}

template <class T>
void run(const PathSelectParams& p, Stream stream) {
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  const T* logits = static_cast<const T*>(p.logits);
  const Strides2 stride{p.logits_stride[0], p.logits_stride[1]};
  const int64_t count = int64_t(p.batch) * p.slots, groups = count * num_groups(p.vocab_size);
  const float* cold = nullptr;
  float* no_sums = nullptr;
  launch<ScanRows<T>>("path_select", stream, groups_for(groups), kThreads, logits, stride, p.slots, p.vocab_size,
                      groups, cold, w.tops, no_sums);
  launch<ChooseCandidates<T>>("path_select", stream, count, kThreads, logits, stride, p.slots, p.vocab_size,
                              p.num_candidates,
                              w.tops, p.candidates, w.values, Local<RowMemory>{1});
  if (p.rank > 0) by_dtype(p.selector_dtype, [&](auto type) { fill<decltype(type)>(p, w, stream); });
  const int rows = p.rank > 0 ? p.num_candidates : 1;
  launch<ChooseEdges>("path_select", stream, groups_for(count * rows), kThreads, p.scores, p.slots, rows,
                      p.num_candidates,
                      count * rows, p.temperature, p.seeds, p.starts, w.choices);
  launch<WalkLattice>("path_select", stream, p.batch, 32, p.scores, p.slots, rows, p.num_candidates,
                      p.temperature, w.choices,
                      p.candidates, p.tokens, p.probs, Local<int>{p.slots + 1});
}

}  // namespace

int64_t scratch_bytes(const PathSelectParams& p) {
  char* part = nullptr;
  carve_workspace(p, part);
  return part - static_cast<char*>(nullptr);
}

void path_select(const PathSelectParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p, stream); });
}

}  // namespace pydflash::sycl_backend
