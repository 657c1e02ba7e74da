#include "cuda/candidates.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kSide = 16, kRanks = 256;  // a block of the lattice: kSide x kSide edges, kRanks of the sum at a time

// The sum's factors, of kSide candidates each; later the choices of a small lattice.
struct LatticeTile {
  static constexpr int kStride = kRanks + 4;  // eight rows of four neighbouring ranks meet all banks
  union {
    struct {
      float left[kSide][kStride], right[kSide][kStride];
    };
    int choices[2 * kSide * kStride];
  };
  bool last;
};

struct Workspace {
  LogitRows rows;
  float* logits;  // [batch, slots, num_candidates]: of the candidates
  // Of every row of a lattice of at most kSide candidates: which candidate follows, and the law it was drawn from.
  int* choices;  // [batch, slots, num_candidates]
  float* laws;   // [batch, slots, num_candidates, num_candidates]
};

// Whether a block of the lattice holds whole rows, and one block the choices of a batch row.
bool is_small(const PathSelectParams& p) {
  return p.rank > 0 && p.num_candidates <= kSide &&
         p.slots * (p.num_candidates + 1) <= 2 * kSide * LatticeTile::kStride;
}

Workspace carve_workspace(const PathSelectParams& p, char*& part) {
  Workspace w{};
  w.rows = carve_rows(part, p.batch, p.slots, p.vocab_size, p.logits, p.logits_stride);
  w.logits = p.rank > 0 ? carve<float>(part, w.rows.count * p.num_candidates) : p.scores;
  if (!is_small(p)) return w;
  w.choices = carve<int>(part, w.rows.count * p.num_candidates);
  w.laws = carve<float>(part, p.probs != nullptr ? w.rows.count * p.num_candidates * p.num_candidates : 0);
  return w;
}

// Draws from a row of scores, NaN counting as -inf, for a whole warp; writes the law of the choice where `probs` is
// given. Lanes take neighbouring candidates.
__device__ __noinline__ int choose(const float* row, int count, float temperature, float u, float* probs) {
  const int lane = lane_index(), each = (count + 31) / 32, begin = min(lane * each, count);
  const int end = min(begin + each, count);
  float top = -INFINITY;
  int best = INT32_MAX;
  for (int c = begin; c < end; ++c)
    if (row[c] > top) top = row[c], best = c;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, top, step);
    const int index = __shfl_xor_sync(kAllLanes, best, step);
    if (other > top || (other == top && index < best)) top = other, best = index;
  }
  if (!(temperature > 0) || top == -INFINITY) {  // a row without a finite score is certain of candidate 0
    best = top == -INFINITY ? 0 : best;
    for (int c = begin; probs != nullptr && c < end; ++c) probs[c] = c == best ? 1.0f : 0.0f;
    return best;
  }
  const auto weight = [&](int c) {
    return row[c] == top ? 1.0f : row[c] < top ? expf((row[c] - top) / temperature) : 0.0f;
  };
  double sum = 0;
  for (int c = begin; c < end; ++c) sum += weight(c);
  double scan = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(kAllLanes, scan, step);
    if (lane >= step) scan += other;
  }
  const double total = __shfl_sync(kAllLanes, scan, 31);
  double before = __shfl_up_sync(kAllLanes, scan, 1);
  if (lane == 0) before = 0;
  const unsigned hits = __ballot_sync(kAllLanes, sum > 0 && before + sum > u * total);
  const unsigned positive = __ballot_sync(kAllLanes, sum > 0);
  const int winner = hits != 0 ? __ffs(int(hits)) - 1 : 31 - __clz(int(positive));
  int chosen = begin;
  for (int c = begin; c < (lane == winner ? end : begin) && before <= u * total; ++c) {
    const float here = weight(c);
    before += here;
    if (here > 0) chosen = c;
  }
  for (int c = begin; probs != nullptr && c < end; ++c) probs[c] = float(weight(c) / total);
  return __shfl_sync(kAllLanes, chosen, winner);
}

// What is drawn in a batch row's slots.
struct Draws {
  float temperature;
  int64_t seed;
  int32_t start;

  __device__ Draws(const PathSelectParams& p, int64_t b)
      : temperature(p.temperature != nullptr ? p.temperature[b] : 0.0f), seed(p.seeds[b]), start(p.starts[b]) {}
  __device__ float u(int slot) const {
    return temperature > 0 ? uniform(seed, start, Purpose::draft, uint32_t(slot + 1)) : 0.0f;
  }
};

// For a whole warp: the choice of one slot from a row of scores.
__device__ int step(const PathSelectParams& p, const Draws& draws, int64_t index, const float* row) {
  float* probs = p.probs != nullptr ? p.probs + index * p.num_candidates : nullptr;
  const int chosen = choose(row, p.num_candidates, draws.temperature, draws.u(int(index % p.slots)), probs);
  if (lane_index() == 0) p.tokens[index] = p.candidates[index * p.num_candidates + chosen];
  return chosen;
}

// One block chooses the candidates of one slot; without a selector its token as well.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 2) choose_candidates(const PathSelectParams p, const Workspace w) {
  __shared__ CandidateMemory shared;
  release_successor();
  wait_for_predecessor();
  const int64_t index = blockIdx.x;
  Candidates<T> candidates(w.rows, index, shared, NAN);
  Prefix prefix;
  const int listed = candidates.collect(Target::count(p.num_candidates), prefix);
  sort_descending(shared.keys, listed);
  for (int c = int(threadIdx.x); c < p.num_candidates; c += int(blockDim.x)) {
    const uint64_t key = shared.keys[c];
    p.candidates[index * p.num_candidates + c] = key_id(key);
    w.logits[index * p.num_candidates + c] = key_value(key);
  }
  if (p.rank > 0) return;
  __syncthreads();
  if (warp_index() == 0) step(p, Draws(p, blockIdx.x / unsigned(p.slots)), index, w.logits + index * p.num_candidates);
}

// Some ranks of a row from `first` on; what lies behind the last rank is zero.
template <class T>
__device__ __forceinline__ void load_ranks(const T* row, int first, int rank, bool aligned,
                                           float (&x)[16 / sizeof(T)]) {
  constexpr int kVector = 16 / int(sizeof(T));
  if (aligned && first + kVector <= rank) return widen(load<kVector>(row + first), x);
#pragma unroll
  for (int j = 0; j < kVector; ++j) x[j] = first + j < rank ? widen(row[first + j]) : 0.0f;
}

template <int N>
__device__ __forceinline__ void store_ranks(float* to, const float (&x)[N]) {
#pragma unroll
  for (int j = 0; j < N; j += 4) *reinterpret_cast<float4*>(to + j) = float4{x[j], x[j + 1], x[j + 2], x[j + 3]};
}

// The choices of the rows of one slot's lattice: kSide neighbouring lanes have a row, each a candidate.
__device__ __forceinline__ void choose_all(const PathSelectParams& p, const Workspace& w, int64_t index, int a, int c,
                                           float score) {
  const int count = p.num_candidates, half = int(threadIdx.x) % 32 / kSide * kSide;
  const Draws draws(p, index / p.slots);
  const float value = c < count ? no_nan(score) : -INFINITY;
  float top = value;
#pragma unroll
  for (int step = kSide / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
  const auto lowest = [half](bool wanted) {
    return __ffs(int(__ballot_sync(kAllLanes, wanted) >> half & ((1u << kSide) - 1))) - 1;
  };
  int chosen = lowest(value == top && (c < count || top == -INFINITY));
  float law = c == chosen ? 1.0f : 0.0f;
  if (draws.temperature > 0) {
    const float weight = value == top ? 1.0f : expf((value - top) / draws.temperature);
    double scan = c < count ? weight : 0.0f;
#pragma unroll
    for (int step = 1; step < kSide; step *= 2) {
      const double other = __shfl_up_sync(kAllLanes, scan, step);
      if (c >= step) scan += other;
    }
    const double total = __shfl_sync(kAllLanes, scan, half + kSide - 1), beyond = draws.u(int(index % p.slots)) * total;
    const int drawn = lowest(weight > 0 && scan > beyond);
    if (top > -INFINITY) chosen = drawn, law = float(weight / total);
  }
  if (a >= count || c >= count) return;
  if (c == 0) w.choices[index * count + a] = chosen;
  if (p.probs != nullptr) w.laws[(index * count + a) * count + c] = law;
}

// Along the choices of one batch row, for a whole block.
__device__ __forceinline__ void follow_choices(const PathSelectParams& p, const Workspace& w, int64_t b, int* choices) {
  const int count = p.num_candidates, size = p.slots * count;
  const int64_t first = b * p.slots;
  int* before = choices + size;  // the candidate before each slot
  for (int i = int(threadIdx.x); i < size; i += int(blockDim.x)) choices[i] = __ldcg(w.choices + first * count + i);
  __syncthreads();
  if (threadIdx.x == 0)
    for (int slot = 0, at = 0; slot < p.slots; ++slot) before[slot] = at, at = choices[slot * count + at];
  __syncthreads();
  for (int i = int(threadIdx.x); i < size; i += int(blockDim.x)) {
    const int slot = i / count, c = i % count;
    const int64_t index = first + slot;
    if (p.probs != nullptr) p.probs[index * count + c] = __ldcg(w.laws + (index * count + before[slot]) * count + c);
    if (choices[slot * count + before[slot]] == c) p.tokens[index] = p.candidates[index * count + c];
  }
}

// scores[a][c] = logit[c] + sum_r predecessor[before_a][r] * hidden[r] * successor[candidate_c][r] of one slot. In a
// small lattice the choices too, and the last block of a batch row to finish walks along them.
template <class T>
__global__ void __launch_bounds__(kSide* kSide) fill_lattice(const PathSelectParams p, const Workspace w, bool aligned,
                                                             bool small) {
  __shared__ __align__(16) LatticeTile tile;
  release_successor();
  wait_for_predecessor();
  constexpr int kVector = 16 / int(sizeof(T)), kPieces = kRanks / kVector;
  const int64_t index = blockIdx.x, b = blockIdx.x / unsigned(p.slots), count = p.num_candidates;
  const int first_c = int(blockIdx.y) * kSide, first_a = int(blockIdx.z) * kSide;
  const int a = int(threadIdx.x) / kSide, c = int(threadIdx.x) % kSide;
  const bool start = blockIdx.x % unsigned(p.slots) == 0;  // all rows of the first slot start at the anchor
  const int64_t* ids = p.candidates + index * count;
  const int64_t anchor = min(max(p.anchors[b], int64_t(0)), int64_t(p.codebook_size) - 1);
  const T* hidden = static_cast<const T*>(p.hidden) + index * p.rank;
  const bool inside = first_a + a < count && first_c + c < count;
  const float logit = inside ? w.logits[index * count + first_c + c] : 0.0f;
  float sum = 0;
  for (int first = 0; first < p.rank; first += kRanks) {
    if (first > 0) __syncthreads();
    const int pieces = min(kPieces, (p.rank - first + kVector - 1) / kVector);
    for (int i = int(threadIdx.x); i < kSide * pieces; i += kSide * kSide) {
      const int row = i / pieces, at = i % pieces * kVector;
      const int from_a = min(first_a + row, int(count) - 1), from_c = min(first_c + row, int(count) - 1);
      const int64_t before = start ? anchor : ids[from_a - count];
      float left[kVector], right[kVector], factor[kVector];
      load_ranks(static_cast<const T*>(p.successor) + ids[from_c] * p.rank, first + at, p.rank, aligned, right);
      load_ranks(static_cast<const T*>(p.predecessor) + before * p.rank, first + at, p.rank, aligned, left);
      load_ranks(hidden, first + at, p.rank, aligned, factor);
#pragma unroll
      for (int j = 0; j < kVector; ++j) left[j] *= factor[j];
      store_ranks(&tile.left[row][at], left);
      store_ranks(&tile.right[row][at], right);
    }
    __syncthreads();
    const int width = min(p.rank - first, kRanks);
#pragma unroll 4
    for (int r = 0; r < width; r += 4) {
      const float4 left = *reinterpret_cast<const float4*>(&tile.left[a][r]);
      const float4 right = *reinterpret_cast<const float4*>(&tile.right[c][r]);
      sum = fmaf(left.x, right.x, sum), sum = fmaf(left.y, right.y, sum);
      sum = fmaf(left.z, right.z, sum), sum = fmaf(left.w, right.w, sum);
    }
  }
  if (inside) p.scores[(index * count + first_a + a) * count + first_c + c] = logit + sum;
  if (!small) return;
  choose_all(p, w, index, a, c, logit + sum);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    tile.last = atomicAdd(w.rows.finished + b, 1) == p.slots - 1;
    __threadfence();
  }
  __syncthreads();
  if (tile.last) follow_choices(p, w, b, tile.choices);
}

// One warp walks through one batch row of a lattice that is not small.
__global__ void __launch_bounds__(32) walk_lattice(const PathSelectParams p) {
  release_successor();
  wait_for_predecessor();
  const int64_t first = int64_t(blockIdx.x) * p.slots, count = p.num_candidates;
  const Draws draws(p, blockIdx.x);
  for (int slot = 0, at = 0; slot < p.slots; ++slot)
    at = step(p, draws, first + slot, p.scores + ((first + slot) * count + at) * count);
}

template <class T>
void fill(const PathSelectParams& p, const Workspace& w, Stream stream) {
  bool aligned = int64_t(p.rank) * int64_t(sizeof(T)) % 16 == 0;
  for (const void* data : {p.hidden, p.predecessor, p.successor})
    aligned = aligned && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const unsigned side = unsigned((p.num_candidates + kSide - 1) / kSide);
  launch("path_select", fill_lattice<T>, dim3(unsigned(w.rows.count), side, side), dim3(kSide * kSide), 0, stream, p, w,
         aligned, is_small(p));
}

template <class T>
void run(const PathSelectParams& p, Stream stream) {
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  scan<T>(w.rows, {}, "path_select", stream);
  const bool few = w.rows.count <= 2 * device_info(stream.device).multiprocessors;
  launch("path_select", choose_candidates<T>, dim3(unsigned(w.rows.count)), dim3(few ? 512 : 256), 0, stream, p, w);
  if (p.rank == 0) return;
  by_dtype(p.selector_dtype, [&](auto type) { fill<decltype(type)>(p, w, stream); });
  if (!is_small(p)) launch("path_select", walk_lattice, dim3(unsigned(p.batch)), dim3(32), 0, stream, p);
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

}  // namespace pydflash::cuda
