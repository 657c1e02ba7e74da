#include "cuda/law.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kAccepted = -1, kRefused = -2;  // verdicts on a row's draft; others are the token drawn

// The law of a row whose draft is judged by q, for the residual.
struct Settled {
  uint64_t least;
  double total;
  float top, floor;
};

struct Workspace {
  LogitRows rows;
  int* verdicts;     // [batch, slots]
  Settled* settled;  // [batch, slots]
};

struct Memory {
  CandidateMemory candidates;
  int slot, depth, first, token;  // of the walk
  bool last, done;
};

constexpr int kStaged = int(sizeof(CandidateMemory::keys) / sizeof(int));

Workspace carve_workspace(const RejectSampleParams& p, char*& part) {
  Workspace w{};
  w.rows = carve_rows(part, p.batch, p.slots, p.vocab_size, p.logits, p.logits_stride);
  w.verdicts = carve<int>(part, w.rows.count);
  w.settled = carve<Settled>(part, p.draft_slots > 0 ? w.rows.count : 0);
  return w;
}

// q of one draft slot: over the whole vocabulary, or over `count` ids where `ids` is given.
struct DraftRow {
  const float* probs;
  const int64_t* ids;
  int count;

  __device__ DraftRow(const RejectSampleParams& p, int64_t b, int slot)
      : probs(p.draft_probs + b * p.draft_probs_stride[0] + slot * p.draft_probs_stride[1]),
        ids(p.draft_ids == nullptr ? nullptr : p.draft_ids + (b * p.draft_slots + slot) * p.num_candidates),
        count(p.num_candidates) {}

  // q(id) for a whole warp; a NaN stays one.
  __device__ float at(int64_t id) const {
    if (ids == nullptr) return probs[id];
    float share = 0;
#pragma unroll 1
    for (int c = lane_index(); c < count; c += 32)
      if (ids[c] == id) share += probs[c];
    return lane_sum(share);
  }

  // The same for one thread.
  __device__ float alone_at(int64_t id) const {
    if (ids == nullptr) return probs[id];
    float share = 0;
#pragma unroll 1
    for (int c = 0; c < count; ++c)
      if (ids[c] == id) share += probs[c];
    return share;
  }

  // For a whole warp: the tile of candidate c of a sparse q, or -1 where an earlier candidate lies there or c nowhere.
  __device__ int tile_opened(int c, int vocab_size) const {
    const auto tile_of = [=](int64_t id) { return id >= 0 && id < vocab_size ? int(id) / kTile : -1; };
    const int tile = tile_of(ids[c]);
    bool before = false;
#pragma unroll 1
    for (int other = lane_index(); other < c; other += 32) before = before || tile_of(ids[other]) == tile;
    return __any_sync(kAllLanes, before) ? -1 : tile;
  }

  // For a whole warp: visit(id) of every candidate of a sparse q in a tile, once.
  template <class Visit>
  __device__ void each_in(int tile, int vocab_size, Visit visit) const {
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      const int c = base + lane_index();
      const int64_t id = c < count ? ids[c] : -1;
      unsigned inside = __ballot_sync(kAllLanes, id >= 0 && id < vocab_size && id / kTile == tile);
      for (; inside != 0; inside &= inside - 1) {
        const int source = __ffs(int(inside)) - 1;
        const int64_t one = __shfl_sync(kAllLanes, id, source);
        bool before = false;
#pragma unroll 1
        for (int other = lane_index(); other < base + source; other += 32) before = before || ids[other] == one;
        if (!__any_sync(kAllLanes, before)) visit(int(one));
      }
    }
  }
};

// How many slots lie before a slot on its path, or -1 where its parents lead nowhere.
__device__ int depth_of(const RejectSampleParams& p, int64_t b, int slot) {
  if (p.parents == nullptr) return slot;
  int depth = 0;
  for (; slot > 0; ++depth) {
    const int parent = p.parents[b * p.slots + slot];
    if (parent < 0 || parent >= slot) return -1;
    slot = parent;
  }
  return depth;
}

// The token that a row draws, or whether it accepts the draft whose q is given.
template <class T>
__device__ __forceinline__ int settle(const RejectSampleParams& p, const Workspace& w, int64_t b, int slot,
                                      Memory& shared) {
  const int64_t index = b * p.slots + slot;
  const float temperature = p.temperature[b];
  RowLaw<T> law(w.rows, index, shared.candidates);
  if (!(temperature > 0)) return law.argmax();
  const int depth = depth_of(p, b, slot);
  if (depth < 0) return 0;
  const int64_t draft = slot < p.draft_slots ? p.tokens[b * p.slots + slot + 1] : -1;
  const bool judged = draft >= 0, known = judged && draft < p.vocab_size;
  const float logit = known ? no_nan(widen(w.rows.row<T>(index)[draft])) : 0.0f;
  const float share = known ? DraftRow(p, b, slot).at(draft) : 0.0f;
  const Purpose purpose = judged ? Purpose::accept : Purpose::target;
  const float u = uniform(p.seeds[b], int64_t(p.starts[b]) + depth + 1, purpose);
  const Drawn drawn = law.draw({temperature, p.top_p[b], p.min_p[b], p.top_k[b]}, u, judged);
  if (!judged) return drawn.id;
  const Law& found = law.law();
  if (threadIdx.x == 0) w.settled[index] = {found.least, drawn.total, found.top, found.floor};
  const double q = share < 0 ? 0.0 : double(share);
  return known && double(u) * q * drawn.total < found.weight(logit, int(draft)) ? kAccepted : kRefused;
}

// A draw from max(p - q, 0) of a row, in units of weight; from p itself where nothing is left of it.
template <class T>
__device__ __noinline__ int draw_residual(const RejectSampleParams& p, const Workspace& w, int64_t b, int slot,
                                          int depth, Memory& shared) {
  const int64_t index = b * p.slots + slot;
  const Settled* from = w.settled + index;
  const Law found{__ldcg(&from->top), rate_of(p.temperature[b]), __ldcg(&from->floor),
                  uint64_t(__ldcg(reinterpret_cast<const unsigned long long*>(&from->least)))};
  const double total = __ldcg(&from->total);
  RowLaw<T> law(w.rows, index, shared.candidates, found);
  const DraftRow q(p, b, slot);
  const auto taken = [total](float share) { return share > 0 ? float(share * total) : 0.0f; };  // NaN takes nothing
  if (q.ids == nullptr) {
#pragma unroll 1
    for (int tile = warp_index(); tile < w.rows.tiles; tile += num_warps())
      law.measure(tile, [&](float (&weights)[Tile<T>::kValues]) {
#pragma unroll
        for (int k = 0; k < Tile<T>::kValues; ++k)
          if (weights[k] > 0) weights[k] = fmaxf(weights[k] - taken(q.probs[tile * kTile + Tile<T>::at(k)]), 0.0f);
      });
  } else {  // a tile without candidates keeps its mass
#pragma unroll 1
    for (int c = warp_index(); c < q.count; c += num_warps()) {
      const int tile = q.tile_opened(c, p.vocab_size);
      if (tile < 0) continue;
      law.measure(tile, [&](float (&weights)[Tile<T>::kValues]) {
        q.each_in(tile, p.vocab_size, [&](int id) {
          const float less = taken(q.at(id));
#pragma unroll
          for (int k = 0; k < Tile<T>::kValues; ++k)
            if (tile * kTile + Tile<T>::at(k) == id) weights[k] = fmaxf(weights[k] - less, 0.0f);
        });
      });
    }
  }
  __syncthreads();
  const float u = uniform(p.seeds[b], int64_t(p.starts[b]) + depth + 1, Purpose::residual);
  const Drawn drawn = law.locate(u, true, [&](int id) { return taken(q.alone_at(id)); });
  if (drawn.total > 0) return drawn.id;
  law.measure();
  return law.locate(u, true).id;
}

// For a whole warp: the first slot from `first` on that continues `slot` with `token`, or -1.
__device__ int child_of(const RejectSampleParams& p, int64_t b, int slot, int first, int64_t token) {
  const int64_t* tokens = p.tokens + b * p.slots;
  const int32_t* parents = p.parents == nullptr ? nullptr : p.parents + b * p.slots;
  const int end = parents == nullptr ? min(slot + 2, p.slots) : p.slots;
#pragma unroll 1
  for (int base = first; base < end; base += 32) {
    const int i = base + lane_index();
    const bool child = i < end && tokens[i] == token && (parents == nullptr || parents[i] == slot);
    if (const unsigned found = __ballot_sync(kAllLanes, child); found != 0) return base + __ffs(int(found)) - 1;
  }
  return -1;
}

__device__ __forceinline__ int verdict_of(const RejectSampleParams& p, const Workspace& w, int64_t b, int slot,
                                          const int* staged) {
  return slot < kStaged ? staged[slot] : __ldcg(w.verdicts + b * p.slots + slot);
}

// For a whole warp: how many of the next 32 drafts of a chain are accepted behind `slot`.
__device__ int accepted_run(const RejectSampleParams& p, const Workspace& w, int64_t b, int slot, const int* staged) {
  const int i = slot + lane_index();
  const int verdict = i + 1 < p.slots ? verdict_of(p, w, b, i, staged) : kRefused;
  const bool accepted = verdict == kAccepted || (verdict >= 0 && p.tokens[b * p.slots + i + 1] == verdict);
  const unsigned refused = __ballot_sync(kAllLanes, !accepted);
  return refused == 0 ? 32 : __ffs(int(refused)) - 1;
}

// Descends from shared.slot, for the first warp, until the walk ends or a residual must be drawn.
__device__ void descend(const RejectSampleParams& p, const Workspace& w, int64_t b, Memory& shared) {
  const int* staged = reinterpret_cast<const int*>(shared.candidates.keys);
  int slot = shared.slot, depth = shared.depth, first = shared.first, token = shared.token;
  bool done = false;
  for (;;) {
    int next = -1;
    if (token < 0 && p.parents == nullptr) {
      const int run = accepted_run(p, w, b, slot, staged);
      if (lane_index() < run) p.index[b * p.slots + depth + 1 + lane_index()] = slot + 1 + lane_index();
      slot += run, depth += run;
      if (run == 32) continue;
    }
    if (token < 0) {
      const int verdict = verdict_of(p, w, b, slot, staged);
      if (verdict == kRefused) break;
      if (verdict == kAccepted) next = slot + 1;
      token = verdict, first = slot + 1;
    }
    if (token >= 0) next = child_of(p, b, slot, first, token);
    done = next < 0;
    if (done) break;
    slot = next, token = -1;
    ++depth;
    if (lane_index() == 0) p.index[b * p.slots + depth] = slot;
  }
  __syncwarp();
  if (lane_index() == 0) shared.slot = slot, shared.depth = depth, shared.token = token, shared.done = done;
}

template <class T>
__device__ void walk(const RejectSampleParams& p, const Workspace& w, int64_t b, Memory& shared) {
  int* staged = reinterpret_cast<int*>(shared.candidates.keys);
#pragma unroll 1
  for (int i = int(threadIdx.x); i < p.slots; i += int(blockDim.x)) {
    if (i < kStaged) staged[i] = __ldcg(w.verdicts + b * p.slots + i);
    p.index[b * p.slots + i] = i == 0 ? 0 : -1;
  }
  if (threadIdx.x == 0) shared.slot = shared.depth = shared.first = 0, shared.token = -1;
  for (;;) {
    __syncthreads();
    if (warp_index() == 0) descend(p, w, b, shared);
    __syncthreads();
    if (shared.done) break;
    const int slot = shared.slot, token = draw_residual<T>(p, w, b, slot, shared.depth, shared);
    if (threadIdx.x == 0) shared.token = token, shared.first = slot + 2;  // beside the refused draft
  }
  if (threadIdx.x == 0) p.num_accepted[b] = shared.depth, p.bonus[b] = shared.token;
}

// One block settles one row; the last to finish of a batch row walks down its slots.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 2) settle_rows(const RejectSampleParams p, const Workspace w) {
  __shared__ Memory shared;
  release_successor();
  wait_for_predecessor();
  const unsigned b = blockIdx.x / unsigned(p.slots);
  const int verdict = settle<T>(p, w, b, int(blockIdx.x - b * unsigned(p.slots)), shared);
  __syncthreads();
  if (threadIdx.x == 0) {
    w.verdicts[blockIdx.x] = verdict;
    __threadfence();
    shared.last = atomicAdd(w.rows.finished + b, 1) == p.slots - 1;
    __threadfence();
  }
  __syncthreads();
  if (shared.last) walk<T>(p, w, b, shared);
}

template <class T>
void run(const RejectSampleParams& p, Stream stream) {
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  scan<T>(w.rows, {p.temperature, p.top_p, p.top_k}, "reject_sample", stream);
  const bool few = w.rows.count <= 2 * device_info(stream.device).multiprocessors;
  launch("reject_sample", settle_rows<T>, dim3(unsigned(w.rows.count)), dim3(few ? 512 : 256), 0, stream, p, w);
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

}  // namespace pydflash::cuda
