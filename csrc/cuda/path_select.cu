#include "cuda/candidates.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kMaxThreads = 512, kWalkThreads = 256;
constexpr int kSide = 16, kRanks = 256;  // a block of the lattice: kSide x kSide edges, kRanks of the sum at a time
constexpr int kSmallRow = 32, kMaxChoices = 8192;

struct Workspace {
  LogitRows rows;
  float* logits;  // [batch, slots, top_k]: of the candidates
};

Workspace carve_workspace(const PathSelectParams& p, char*& part) {
  Workspace w{};
  w.rows = carve_rows(part, p.batch, p.slots, p.vocab_size, p.logits, p.logits_stride);
  w.logits = p.rank > 0 ? carve<float>(part, w.rows.count * p.top_k) : p.scores;
  return w;
}

// One block chooses the candidates of one slot.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, 2) choose_candidates(const PathSelectParams p, const Workspace w) {
  __shared__ CandidateMemory shared;
  release_successor();
  wait_for_predecessor();
  const int64_t index = blockIdx.x;
  Candidates<T> candidates(w.rows, index, shared);
  Prefix prefix;
  const int listed = candidates.collect(Target::count(p.top_k), prefix);
  sort_descending(shared.keys, listed);
  for (int c = int(threadIdx.x); c < p.top_k; c += int(blockDim.x)) {
    const uint64_t key = shared.keys[c];
    p.candidates[index * p.top_k + c] = key_id(key);
    w.logits[index * p.top_k + c] = key_value(key);
  }
}

// The sum's factors, of kSide candidates each.
struct LatticeTile {
  static constexpr int kStride = kRanks + 4;  // eight rows of four neighbouring ranks meet all banks
  float left[kSide][kStride], right[kSide][kStride];
};

// Fills kRanks ranks from `first` on of a row; what lies behind the last rank is zero.
template <class T, class Store>
__device__ __forceinline__ void load_ranks(const T* row, int first, int rank, int piece, bool aligned, Store store) {
  constexpr int kVector = 16 / int(sizeof(T));
  const int at = piece * kVector;
  if (aligned && first + at + kVector <= rank) {
    float values[kVector];
    widen(load<kVector>(row + first + at), values);
#pragma unroll
    for (int j = 0; j < kVector; ++j) store(at + j, values[j]);
  } else {
    for (int j = 0; j < kVector; ++j) store(at + j, first + at + j < rank ? widen(row[first + at + j]) : 0.0f);
  }
}

// scores[a][c] = logit[c] + sum_r predecessor[before_a][r] * hidden[r] * successor[candidate_c][r] of one slot.
template <class T>
__global__ void __launch_bounds__(kSide* kSide) fill_lattice(const PathSelectParams p, const Workspace w, bool aligned) {
  __shared__ __align__(16) LatticeTile tile;
  release_successor();
  wait_for_predecessor();
  constexpr int kPieces = kRanks * int(sizeof(T)) / 16;
  const int64_t index = blockIdx.x, count = p.top_k;
  const int first_c = int(blockIdx.y) * kSide, first_a = int(blockIdx.z) * kSide;
  const int a = int(threadIdx.x) / kSide, c = int(threadIdx.x) % kSide;
  const bool start = index % p.slots == 0;  // all rows of the first slot start at the anchor
  const int64_t* ids = p.candidates + index * count;
  const int64_t anchor = min(max(p.anchors[index / p.slots], int64_t(0)), int64_t(p.codebook_size) - 1);
  const T* hidden = static_cast<const T*>(p.hidden) + index * p.rank;
  float sum = 0;
  for (int first = 0; first < p.rank; first += kRanks) {
    if (first > 0) __syncthreads();
    for (int i = int(threadIdx.x); i < kSide * kPieces; i += kSide * kSide) {
      const int row = i / kPieces, piece = i % kPieces;
      if (first + piece * 16 / int(sizeof(T)) >= p.rank) continue;
      const int from_a = min(first_a + row, int(count) - 1), from_c = min(first_c + row, int(count) - 1);
      const int64_t before = start ? anchor : ids[from_a - count];
      const T* left = static_cast<const T*>(p.predecessor) + before * p.rank;
      const T* right = static_cast<const T*>(p.successor) + ids[from_c] * p.rank;
      load_ranks(right, first, p.rank, piece, aligned, [&](int r, float x) { tile.right[row][r] = x; });
      load_ranks(left, first, p.rank, piece, aligned, [&](int r, float x) { tile.left[row][r] = x; });
      load_ranks(hidden, first, p.rank, piece, aligned, [&](int r, float x) { tile.left[row][r] *= x; });
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
  if (first_a + a < count && first_c + c < count)
    p.scores[(index * count + first_a + a) * count + first_c + c] = w.logits[index * count + first_c + c] + sum;
}

// What a row of scores leads to, NaN counting as -inf, for a group of kWidth threads (1, or a warp); writes the law of
// the choice where `probs` is given. Threads take neighbouring candidates.
template <int kWidth>
__device__ int choose(const float* row, int count, float temperature, float u, float* probs) {
  const int rank = int(threadIdx.x) % kWidth, each = (count + kWidth - 1) / kWidth;
  const int begin = min(rank * each, count), end = min(begin + each, count);
  float top = -INFINITY;
  int best = INT32_MAX;
  for (int c = begin; c < end; ++c)
    if (row[c] > top) top = row[c], best = c;
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2) {
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
  double scan = sum, total = sum, before = 0;
  int winner = 0;
  if constexpr (kWidth > 1) {
#pragma unroll
    for (int step = 1; step < kWidth; step *= 2) {
      const double other = __shfl_up_sync(kAllLanes, scan, step);
      if (rank >= step) scan += other;
    }
    total = __shfl_sync(kAllLanes, scan, kWidth - 1);
    before = __shfl_up_sync(kAllLanes, scan, 1);
    if (rank == 0) before = 0;
    const unsigned hits = __ballot_sync(kAllLanes, sum > 0 && before + sum > u * total);
    const unsigned positive = __ballot_sync(kAllLanes, sum > 0);
    winner = hits != 0 ? __ffs(int(hits)) - 1 : 31 - __clz(int(positive));
  }
  int chosen = begin;
  if (rank == winner) {
    for (int c = begin; c < end && before <= u * total; ++c) {
      const float here = weight(c);
      before += here;
      if (here > 0) chosen = c;
    }
  }
  if constexpr (kWidth > 1) chosen = __shfl_sync(kAllLanes, chosen, winner);
  for (int c = begin; probs != nullptr && c < end; ++c) probs[c] = float(weight(c) / total);
  return chosen;
}

// Draws along one batch row, slot by slot.
class Walk {
 public:
  __device__ Walk(const PathSelectParams& p, int64_t b)
      : p_(p), first_(b * p.slots), temperature_(p.temperature != nullptr ? p.temperature[b] : 0.0f),
        seed_(p.seeds[b]), start_(p.starts[b]) {}

  // The choice of slot `slot` behind candidate `before`.
  template <int kWidth>
  __device__ int next(int slot, int before, bool last) const {
    const int64_t at = first_ + slot, count = p_.top_k;
    const float* row = p_.scores + (p_.rank > 0 ? (at * count + before) * count : at * count);
    const float u = temperature_ > 0 ? uniform(seed_, start_, Purpose::draft, uint32_t(slot + 1)) : 0.0f;
    const int chosen = choose<kWidth>(row, p_.top_k, temperature_, u, last && p_.probs ? p_.probs + at * count : nullptr);
    if (last && threadIdx.x % kWidth == 0) p_.tokens[at] = p_.candidates[at * count + chosen];
    return chosen;
  }

 private:
  const PathSelectParams& p_;
  const int64_t first_;
  const float temperature_;
  const int64_t seed_;
  const int32_t start_;
};

// One block walks through one batch row. Small lattices: the choices of all rows at once, then along them.
__global__ void __launch_bounds__(kWalkThreads) walk_lattice(const PathSelectParams p, bool small) {
  extern __shared__ int choices[];  // [slots, top_k], and behind them the candidate before each slot
  release_successor();
  wait_for_predecessor();
  const Walk walk(p, blockIdx.x);
  const int thread = int(threadIdx.x), count = p.top_k;
  if (small) {
    int* before = choices + p.slots * count;
    for (int i = thread; i < p.slots * count; i += kWalkThreads)
      if (i == 0 || i >= count) choices[i] = walk.next<1>(i / count, i % count, false);
    __syncthreads();
    if (thread == 0)
      for (int slot = 0, at = 0; slot < p.slots; ++slot) before[slot] = at, at = choices[slot * count + at];
    __syncthreads();
    for (int slot = thread; slot < p.slots; slot += kWalkThreads) walk.next<1>(slot, before[slot], true);
  } else if (p.rank == 0) {
    for (int slot = warp_index(); slot < p.slots; slot += num_warps()) walk.next<32>(slot, 0, true);
  } else if (thread < 32) {
    for (int slot = 0, at = 0; slot < p.slots; ++slot) at = walk.next<32>(slot, at, true);
  }
}

template <class T>
void fill(const PathSelectParams& p, const Workspace& w, Stream stream) {
  bool aligned = int64_t(p.rank) * int64_t(sizeof(T)) % 16 == 0;
  for (const void* data : {p.hidden, p.predecessor, p.successor})
    aligned = aligned && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const unsigned side = unsigned((p.top_k + kSide - 1) / kSide);
  launch("path_select", fill_lattice<T>, dim3(unsigned(w.rows.count), side, side), dim3(kSide * kSide), 0, stream, p, w,
         aligned);
}

template <class T>
void run(const PathSelectParams& p, Stream stream) {
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  scan<T>(w.rows, {}, "path_select", stream);
  const bool few = w.rows.count <= 2 * device_info(stream.device).multiprocessors;
  launch("path_select", choose_candidates<T>, dim3(unsigned(w.rows.count)), dim3(few ? 512 : 256), 0, stream, p, w);
  if (p.rank > 0) by_dtype(p.selector_dtype, [&](auto type) { fill<decltype(type)>(p, w, stream); });
  const int choices = p.slots * p.top_k;
  const bool small = p.rank > 0 && p.top_k <= kSmallRow && choices <= kMaxChoices;
  launch("path_select", walk_lattice, dim3(unsigned(p.batch)), dim3(kWalkThreads),
         small ? sizeof(int) * size_t(choices + p.slots) : 0, stream, p, small);
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
