// The recurrence of Gated DeltaNet, slot by slot: columns of a state are independent, so that a tile of them stays in
// the nearest cache while all slots go over it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/crew.h"
#include "cpu/scratch.h"
#include "cpu/vector.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

constexpr int kWide = 2;                   // vectors of a tile's rows
constexpr int kColumns = kWide * kLanes;   // at most 32; value_dim is a multiple of 16
constexpr int kChains = 4;                 // of a sum over key_dim: latency is hidden, and the order is fixed
constexpr int64_t kParallel = 1 << 15;     // numbers of a state: about 15 us on one core
constexpr int kPromptSlots = 64;

// The kernel's one way from a state to the next, so that a commit repeats a slot to the last bit.
PYDFLASH_FN Floats moved(Floats s, float decay, float k, Floats u) { return s * decay + k * u; }

// What the slots of one block share, normalised: [slots, heads, dim].
struct Slots {
  int count;
  const float *q, *k;            // [slot, key_head, key_dim]
  const float *decay, *beta;     // [slot, value_head]
  int64_t q_stride, k_stride;    // [slot]
  const int *parents, *last_child;  // [slot + 1]: of -1 the first; the last slot that goes on from it
};

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
void unit(const T* from, int dim, float scale, float* to) {
  Floats squares{};
  by_vectors(dim, [&](int i, int count) {
    const Floats x = load_some(from + i, count);
    squares += x * x;
  });
  const float factor = 1.0f / std::sqrt(sum_lanes(squares) + 1e-6f);
  by_vectors(dim, [&](int i, int count) { store_some(to + i, load_some(from + i, count) * factor * scale, count); });
}

// q, k, g and beta of slot i of row b; returns nothing of v, which is read where it lies.
template <class T>
void prepare(const DeltaInputs& in, int64_t b, int64_t i, float* q, float* k, float* g, float* decay, float* beta) {
  const T* x = static_cast<const T*>(in.x) + b * in.x_stride[0] + i * in.x_stride[1];
  const float scale = 1.0f / std::sqrt(float(in.key_dim));
  for (int h = 0; h < in.key_heads; ++h) {
    unit(x + int64_t(h) * in.key_dim, in.key_dim, scale, q + int64_t(h) * in.key_dim);
    unit(x + int64_t(in.key_heads + h) * in.key_dim, in.key_dim, 1.0f, k + int64_t(h) * in.key_dim);
  }
  const T* a = static_cast<const T*>(in.a) + b * in.a_stride[0] + i * in.a_stride[1];
  const T* weight = static_cast<const T*>(in.b) + b * in.b_stride[0] + i * in.b_stride[1];
  for (int h = 0; h < in.value_heads; ++h) {
    g[h] = -std::exp(in.a_log[h]) * softplus(to_float(a[h]) + in.dt_bias[h]);
    decay[h] = std::exp(g[h]);
    beta[h] = to_float(from_float<T>(1.0f / (1.0f + std::exp(-to_float(weight[h])))));
  }
}

// Sum over d of factor[d] * tile[d], a tile being [key_dim][kColumns].
PYDFLASH_FN void along(const float* tile, const float* factor, int dim, Floats (&sum)[kWide]) {
  Floats parts[kChains][kWide] = {};
  for (int d = 0; d < dim; d += kChains)
    for (int c = 0; c < kChains; ++c)
      for (int w = 0; w < kWide; ++w)
        parts[c][w] += load(tile + int64_t(d + c) * kColumns + w * kLanes) * factor[d + c];
  for (int w = 0; w < kWide; ++w) sum[w] = (parts[0][w] + parts[1][w]) + (parts[2][w] + parts[3][w]);
}

PYDFLASH_FN void move(const float* from, float decay, const float* k, const Floats (&u)[kWide], int dim, float* to) {
  for (int d = 0; d < dim; ++d)
    for (int w = 0; w < kWide; ++w) {
      const int64_t at = int64_t(d) * kColumns + w * kLanes;
      store(to + at, moved(load(from + at), decay, k[d], u[w]));
    }
}

// A tile's columns of a state [key_dim, value_dim], of which `columns` are there.
PYDFLASH_FN void fetch(const float* state, int64_t stride, int dim, int columns, float* tile) {
  for (int d = 0; d < dim; ++d) {
    std::fill(tile + columns, tile + kColumns, 0.0f);
    memcpy(tile, state + d * stride, size_t(columns) * sizeof(float));
    tile += kColumns;
  }
}
PYDFLASH_FN void put_back(const float* tile, int64_t stride, int dim, int columns, float* state) {
  for (int d = 0; d < dim; ++d) memcpy(state + d * stride, tile + int64_t(d) * kColumns, size_t(columns) * sizeof(float));
}

// Goes over the slots with a tile; tiles[0] holds where they begin. Returns the tile behind the last slot.
template <class T>
const float* walk(const DeltaInputs& in, const Slots& slots, int64_t b, int head, int first, int columns, float* tiles,
                  float* u_out, int64_t u_stride) {
  const int dim = in.key_dim, key_head = head / (in.value_heads / in.key_heads);
  const int64_t size = int64_t(dim) * kColumns;
  int used = 1;
  int at[65] = {0};  // the tile of slot i - 1
  const T* x = static_cast<const T*>(in.x) + b * in.x_stride[0] + int64_t(2 * in.key_heads) * dim +
               int64_t(head) * in.value_dim + first;
  T* out = static_cast<T*>(in.out) + (b * in.slots * in.value_heads + head) * int64_t(in.value_dim) + first;
  for (int i = 0; i < slots.count; ++i) {
    const int parent = slots.parents[i];
    const bool in_place = slots.last_child[parent + 1] == i;
    at[i + 1] = in_place ? at[parent + 1] : used++;
    const float *from = tiles + at[parent + 1] * size, *k = slots.k + i * slots.k_stride + int64_t(key_head) * dim;
    float* to = tiles + at[i + 1] * size;
    const float decay = slots.decay[int64_t(i) * in.value_heads + head];
    const float beta = slots.beta[int64_t(i) * in.value_heads + head];
    Floats u[kWide], y[kWide];
    along(from, k, dim, u);
    for (int w = 0, c = 0; w < kWide; ++w, c += kLanes) {
      const int count = std::clamp(columns - c, 0, kLanes);
      const Floats v = count > 0 ? load_some(x + i * in.x_stride[1] + c, count) : Floats{};
      u[w] = (v - u[w] * decay) * beta;
      if (u_out != nullptr && count > 0) store_some(u_out + i * u_stride + c, u[w], count);
    }
    move(from, decay, k, u, dim, to);
    along(to, slots.q + i * slots.q_stride + int64_t(key_head) * dim, dim, y);
    for (int w = 0, c = 0; w < kWide && c < columns; ++w, c += kLanes)
      store_some(out + int64_t(i) * in.value_heads * in.value_dim + c, y[w], std::min(columns - c, kLanes));
  }
  return tiles + at[slots.count] * size;
}

// Parents and last children of a row's slots; returns the tiles that a walk needs.
int links(const int64_t* visibility, int slots, int* parents, int* last_child) {
  std::fill(last_child, last_child + slots + 1, -1);
  for (int i = 0; i < slots; ++i) {
    const uint64_t before = uint64_t(visibility[i]) & ((uint64_t(1) << i) - 1);
    parents[i] = before == 0 ? -1 : 63 - __builtin_clzll(before);
    last_child[parents[i] + 1] = i;
  }
  int tiles = 1;
  for (int i = 0; i < slots; ++i) tiles += last_child[parents[i] + 1] != i;
  return tiles;
}

template <class T>
void run_rule(const DeltaRuleParams& p) {
  const DeltaInputs& in = p.in;
  const int64_t rows = int64_t(in.batch) * in.slots, keys = int64_t(in.key_heads) * in.key_dim;
  std::vector<float> memory(size_t(rows * (keys + 2 * in.value_heads)));
  float *q = memory.data(), *decay = q + rows * keys, *beta = decay + rows * in.value_heads;
  in_shares(rows, threads_for(rows * keys, kParallel), [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / in.slots, i = row % in.slots;
      prepare<T>(in, b, i, q + row * keys, p.block_k + b * p.block_k_stride + i * keys,
                 p.block_g + b * p.block_g_stride + i * in.value_heads, decay + row * in.value_heads,
                 beta + row * in.value_heads);
    }
  });
  std::vector<int> tree(size_t(in.batch) * (2 * 64 + 1));
  int most = 1;
  for (int b = 0; b < in.batch; ++b) {
    int* parents = tree.data() + size_t(b) * (2 * 64 + 1);
    most = std::max(most, links(p.visibility + b * p.visibility_stride, in.slots, parents, parents + 64));
  }
  const int64_t pieces = (in.value_dim + kColumns - 1) / kColumns, size = int64_t(in.key_dim) * kColumns;
  const int64_t heads = int64_t(in.batch) * in.value_heads, values = int64_t(in.value_heads) * in.value_dim;
  const int threads = threads_for(heads * in.key_dim * in.value_dim, kParallel);
  const Scratch scratch(most * size * int64_t(sizeof(float)), threads);
  in_shares(heads * pieces, threads, [&](int64_t begin, int64_t end, int thread) {
    float* tiles = reinterpret_cast<float*>(scratch.part(thread));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / pieces / in.value_heads;
      const int head = int(item / pieces % in.value_heads), first = int(item % pieces) * kColumns;
      const int columns = std::min(in.value_dim - first, kColumns);
      float* state = p.state + b * p.state_stride + int64_t(head) * in.key_dim * in.value_dim + first;
      fetch(state, in.value_dim, in.key_dim, columns, tiles);
      const int64_t key = int64_t(head / (in.value_heads / in.key_heads)) * in.key_dim;
      const int count = std::clamp(p.kept_count[b], 0, p.kept);
      for (int n = 0; n < count; ++n) {
        const float* kept_u = p.kept_u + b * p.kept_u_stride + n * values + int64_t(head) * in.value_dim + first;
        Floats u[kWide];
        for (int w = 0, c = 0; w < kWide; ++w, c += kLanes)
          u[w] = c < columns ? load_some(kept_u + c, std::min(columns - c, kLanes)) : Floats{};
        const float g = p.kept_g[b * p.kept_g_stride + int64_t(n) * in.value_heads + head];
        move(tiles, std::exp(g), p.kept_k + b * p.kept_k_stride + n * keys + key, u, in.key_dim, tiles);
      }
      if (count > 0) put_back(tiles, in.value_dim, in.key_dim, columns, state);
      const int* parents = tree.data() + size_t(b) * (2 * 64 + 1);
      const int64_t row = b * in.slots;
      const Slots slots{in.slots, q + row * keys, p.block_k + b * p.block_k_stride,
                        decay + row * in.value_heads, beta + row * in.value_heads, keys, keys, parents, parents + 64};
      walk<T>(in, slots, b, head, first, columns, tiles,
              p.block_u + b * p.block_u_stride + int64_t(head) * in.value_dim + first, values);
    }
  });
}

template <class T>
void run_prompt(const DeltaPromptParams& p) {
  const DeltaInputs& whole = p.in;
  const int64_t keys = int64_t(whole.key_heads) * whole.key_dim, heads = whole.value_heads;
  const int64_t rows = int64_t(whole.batch) * kPromptSlots, pieces = (whole.value_dim + kColumns - 1) / kColumns;
  std::vector<float> memory(size_t(rows * (2 * keys + 3 * heads)));
  float *q = memory.data(), *k = q + rows * keys, *g = k + rows * keys, *decay = g + rows * heads;
  float* beta = decay + rows * heads;
  int parents[64], last_child[65];
  for (int i = 0; i < 64; ++i) parents[i] = i - 1, last_child[i] = i;
  last_child[64] = -1;
  const int threads = omp_get_max_threads();
  const Scratch scratch(int64_t(whole.key_dim) * kColumns * int64_t(sizeof(float)), threads);
  for (int start = 0; start < whole.slots; start += kPromptSlots) {
    const int count = std::min(kPromptSlots, whole.slots - start);
    in_shares(int64_t(whole.batch) * count, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t at = begin; at < end; ++at) {
        const int64_t b = at / count, i = at % count, row = b * kPromptSlots + i;
        prepare<T>(whole, b, start + i, q + row * keys, k + row * keys, g + row * heads, decay + row * heads,
                   beta + row * heads);
      }
    });
    // The same rows, counted from this part's first.
    DeltaInputs in = whole;
    in.x = static_cast<const T*>(whole.x) + start * whole.x_stride[1];
    in.out = static_cast<T*>(whole.out) + int64_t(start) * heads * whole.value_dim;
    in_shares(whole.batch * heads * pieces, threads, [&](int64_t begin, int64_t end, int thread) {
      float* tile = reinterpret_cast<float*>(scratch.part(thread));
      for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / pieces / heads, row = b * kPromptSlots;
        const int head = int(item / pieces % heads), first = int(item % pieces) * kColumns;
        const int columns = std::min(in.value_dim - first, kColumns);
        float* state = p.state + b * p.state_stride + int64_t(head) * in.key_dim * in.value_dim + first;
        fetch(state, in.value_dim, in.key_dim, columns, tile);
        const Slots slots{count, q + row * keys, k + row * keys, decay + row * heads, beta + row * heads, keys, keys,
                          parents, last_child};
        walk<T>(in, slots, b, head, first, columns, tile, nullptr, 0);
        put_back(tile, in.value_dim, in.key_dim, columns, state);
      }
    });
  }
}

}  // namespace

void delta_rule(const DeltaRuleParams& p, Stream) {
  by_dtype(p.in.dtype, [&](auto type) { run_rule<decltype(type)>(p); });
}

void delta_prompt(const DeltaPromptParams& p, Stream) {
  by_dtype(p.in.dtype, [&](auto type) { run_prompt<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
