#include "cpu/scratch.h"
#include "cpu/top_k.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kColumns = 16;  // candidates in a tile of the lattice
constexpr int kRows = 4;      // candidates of the slot before
using Tile = VectorOf<kColumns>::Floats;

int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

template <class T>
const T* logits_of(const PathSelectParams& p, int64_t at) {
  return static_cast<const T*>(p.logits) + at / p.slots * p.logits_stride[0] + at % p.slots * p.logits_stride[1];
}

template <class T>
void choose_candidates(const PathSelectParams& p, int64_t at, float* maxima) {
  const T* row = logits_of<T>(p, at);
  uint64_t keys[kMaxCandidates];
  block_maxima(row, p.vocab_size, maxima);
  top_k(row, p.vocab_size, maxima, p.num_candidates, keys);
  for (int c = 0; c < p.num_candidates; ++c) p.candidates[at * p.num_candidates + c] = key_id(keys[c]);
}

template <class T>
void candidate_logits(const PathSelectParams& p, int64_t at, float* out) {
  const T* row = logits_of<T>(p, at);
  for (int c = 0; c < p.num_candidates; ++c) {
    const float value = to_float(row[p.candidates[at * p.num_candidates + c]]);
    out[c] = value == value ? value : -kInfinity;
  }
}

// scores[a][c] = logit[c] + sum_r predecessor[before_a][r] * hidden[r] * successor[candidate_c][r] of one slot.
// Working memory: left [rows padded to kRows, rank], right [rank, candidates padded to kColumns].
template <class T>
void fill_lattice(const PathSelectParams& p, int64_t at, const float* logits, float* left, float* right) {
  const int64_t rank = p.rank, count = p.num_candidates, width = padded(count, kColumns);
  const bool first = at % p.slots == 0;  // all rows start at the anchor and are the same
  const int64_t rows = first ? 1 : count;
  const T* hidden = static_cast<const T*>(p.hidden) + at * rank;
  const int64_t* ids = p.candidates + at * count;
  for (int64_t a = 0; a < padded(rows, kRows); ++a) {
    const int64_t before = first ? p.anchors[at / p.slots] : ids[(a < rows ? a : 0) - count];
    const T* from = static_cast<const T*>(p.predecessor) + before * rank;
    for (int64_t r = 0; r < rank; ++r) left[a * rank + r] = to_float(from[r]) * to_float(hidden[r]);
  }
  for (int64_t c = 0; c < width; ++c) {
    const T* to = static_cast<const T*>(p.successor) + ids[c < count ? c : 0] * rank;
    for (int64_t r = 0; r < rank; ++r) right[r * width + c] = to_float(to[r]);
  }
  float* scores = p.scores + at * count * count;
  for (int64_t c = 0; c < count; c += kColumns) {
    const int64_t columns = count - c < kColumns ? count - c : kColumns;
    for (int64_t a = 0; a < rows; a += kRows) {
      Tile sums[kRows] = {};
      for (int64_t r = 0; r < rank; ++r) {
        const Tile to = load<kColumns>(right + r * width + c);
        for (int i = 0; i < kRows; ++i) sums[i] += left[(a + i) * rank + r] * to;
      }
      for (int i = 0; i < kRows && a + i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) scores[(a + i) * count + c + j] = logits[c + j] + sums[i][j];
    }
  }
  for (int64_t a = rows; a < count; ++a) memcpy(scores + a * count, scores, sizeof(float) * count);
}

// Chooses among the scores of one row, NaN counting as -inf; writes the law of the choice where `probs` is given.
int choose(const float* row, int count, float temperature, float u, float* probs) {
  int best = 0;
  float top = -kInfinity;
  for (int c = 0; c < count; ++c)
    if (row[c] > top) top = row[best = c];
  if (!(temperature > 0) || top == -kInfinity) {  // a row without a finite score is certain of candidate 0
    for (int c = 0; probs != nullptr && c < count; ++c) probs[c] = c == best ? 1.0f : 0.0f;
    return best;
  }
  float local[kMaxCandidates];
  float* weights = probs != nullptr ? probs : local;
  double total = 0, cumulative = 0;
  for (int c = 0; c < count; ++c) {
    weights[c] = row[c] == top ? 1.0f : row[c] < top ? expf((row[c] - top) / temperature) : 0.0f;
    total += weights[c];
  }
  int chosen = 0;
  for (int c = 0; c < count && cumulative <= u * total; ++c) {
    cumulative += weights[c];
    if (weights[c] > 0) chosen = c;
  }
  for (int c = 0; probs != nullptr && c < count; ++c) probs[c] = float(weights[c] / total);
  return chosen;
}

void walk(const PathSelectParams& p, int64_t b) {
  const int count = p.num_candidates;
  int chosen = 0;
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    const int64_t at = b * p.slots + slot;
    const float* row = p.rank > 0 ? p.scores + (at * count + chosen) * count : p.scores + at * count;
    const float temperature = p.temperature != nullptr ? p.temperature[b] : 0.0f;
    const float u = temperature > 0 ? uniform(p.seeds[b], p.starts[b], Purpose::draft, uint32_t(slot + 1)) : 0.0f;
    chosen = choose(row, count, temperature, u, p.probs != nullptr ? p.probs + at * count : nullptr);
    p.tokens[at] = p.candidates[at * count + chosen];
  }
}

template <class T>
void run(const PathSelectParams& p) {
  const int64_t items = int64_t(p.batch) * p.slots, blocks = num_blocks(p.vocab_size);
  const int64_t left_size = p.rank * padded(p.num_candidates, kRows);
  const int64_t right_size = p.rank * padded(p.num_candidates, kColumns);
  const int threads = threads_for(items * p.vocab_size, 1 << 16);
  const int64_t sides = left_size + right_size;
  const Scratch scratch(4 * (blocks > sides ? blocks : sides) + 192, threads);
  in_shares(items, threads, [&](int64_t begin, int64_t end, int thread) {
    char* part = scratch.part(thread);
    float* maxima = carve<float>(part, blocks);
    for (int64_t at = begin; at < end; ++at) choose_candidates<T>(p, at, maxima);
  });
  in_shares(items, threads, [&](int64_t begin, int64_t end, int thread) {
    char* part = scratch.part(thread);
    float* left = carve<float>(part, left_size);
    float* right = carve<float>(part, right_size);
    for (int64_t at = begin; at < end; ++at) {
      if (p.rank == 0) {
        candidate_logits<T>(p, at, p.scores + at * p.num_candidates);
        continue;
      }
      float logits[kMaxCandidates];
      candidate_logits<T>(p, at, logits);
      by_dtype(p.selector_dtype, [&](auto type) { fill_lattice<decltype(type)>(p, at, logits, left, right); });
    }
  });
  for (int b = 0; b < p.batch; ++b) walk(p, b);
}

}  // namespace

void path_select(const PathSelectParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
