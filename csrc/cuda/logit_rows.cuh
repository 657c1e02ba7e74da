// Rows of logits on a GPU: tiles of them in registers, the order of tokens, and the one pass over all rows.
#pragma once

#include "cuda/block.cuh"
#include "cuda/rows.cuh"

namespace pydflash::cuda {
namespace {

constexpr int kTile = 1024, kGroup = 32;  // tokens; a warp reads a tile, whose groups lie in neighbouring lanes
constexpr int kTileGroups = kTile / kGroup;
constexpr int kScanThreads = 256;

__host__ __device__ __forceinline__ int num_tiles(int vocab_size) { return (vocab_size + kTile - 1) / kTile; }

// Floats as integers of the same order; -0 equals +0.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = bit_cast<unsigned>(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(unsigned x) {
  return bit_cast<float>(x & 0x80000000u ? x & 0x7fffffffu : ~x);
}

// A token as one integer: larger logits first, then lower ids.
__device__ __forceinline__ uint64_t order_key(float value, int id) {
  return uint64_t(ordered(value)) << 32 | unsigned(~id);
}
__device__ __forceinline__ float key_value(uint64_t key) { return from_ordered(unsigned(key >> 32)); }
__device__ __forceinline__ int key_id(uint64_t key) { return int(~unsigned(key)); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Binary exponents per unit of logits: finite and positive, so that no product with an infinity or 0 is a NaN.
__device__ __forceinline__ float rate_of(float temperature) {
  return fminf(fmaxf(1.44269504f / temperature, 1.17549435e-38f), 3.40282347e38f);
}

// e^((x - top) / temperature); top may be infinite.
__device__ __forceinline__ float weight_of(float x, float top, float rate) {
  return x == top ? 1.0f : exp2_fast((x - top) * rate);
}

__device__ __forceinline__ float no_nan(float x) { return fmaxf(x, -INFINITY); }

// How the tokens of a tile lie in a warp: value k of a lane is the tile's token at(k).
template <class T>
struct Tile {
  static constexpr int kVector = 16 / int(sizeof(T)), kValues = kTile / 32, kLoads = kValues / kVector;
  using Pieces = Piece<T, kVector>[kLoads];
  __device__ static __forceinline__ int at(int k) {
    return k / kVector * (32 * kVector) + lane_index() * kVector + k % kVector;
  }
};

// What a lane has of a tile from its value k on; what lies behind the end of the row reads as -inf.
template <class T>
__device__ __forceinline__ Piece<T, Tile<T>::kVector> load_piece(const T* row, int vocab_size, int tile, int k) {
  constexpr int kVector = Tile<T>::kVector;
  const T* from = row + int64_t(tile) * kTile + Tile<T>::at(k);
  const int left = vocab_size - tile * kTile - Tile<T>::at(k);
  if (left >= kVector && reinterpret_cast<uintptr_t>(row) % 16 == 0) return load<kVector>(from);
  T values[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) values[j] = j < left ? from[j] : from_float<T>(-INFINITY);
  return pack(values);
}

template <class T>
__device__ __forceinline__ void load_tile(const T* row, int vocab_size, int tile, typename Tile<T>::Pieces& pieces) {
  using Of = Tile<T>;
  if (vocab_size - tile * kTile >= kTile && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < Of::kLoads; ++i)
      pieces[i] = load<Of::kVector>(row + int64_t(tile) * kTile + Of::at(i * Of::kVector));
  } else {
#pragma unroll
    for (int i = 0; i < Of::kLoads; ++i) pieces[i] = load_piece(row, vocab_size, tile, i * Of::kVector);
  }
}

// The same as floats, where NaN reads as -inf too.
template <class T>
__device__ __forceinline__ void load_tile(const T* row, int vocab_size, int tile, float (&x)[Tile<T>::kValues]) {
  using Of = Tile<T>;
  typename Of::Pieces pieces;
  load_tile(row, vocab_size, tile, pieces);
#pragma unroll
  for (int i = 0; i < Of::kLoads; ++i) {
    float wide[Of::kVector];
    widen(pieces[i], wide);
#pragma unroll
    for (int j = 0; j < Of::kVector; ++j) x[i * Of::kVector + j] = no_nan(wide[j]);
  }
}

// The larger of each of two narrow floats in a word; a number where one is NaN.
__device__ __forceinline__ uint32_t larger_pair(bf16, uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ __forceinline__ uint32_t larger_pair(f16, uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}

template <class T, int N>
__device__ __forceinline__ float largest(const Piece<T, N>& piece) {
  if constexpr (sizeof(T) == 4) {
    float x[N];
    widen(piece, x);
    float most = x[0];
#pragma unroll
    for (int j = 1; j < N; ++j) most = fmaxf(most, x[j]);
    return most;
  } else {
    uint32_t most = piece.words[0];
#pragma unroll
    for (int j = 1; j < N / 2; ++j) most = larger_pair(T{}, most, piece.words[j]);
    float a, b;
    widen_pair(T{}, most, a, b);
    return fmaxf(a, b);
  }
}

// The rows of a [batch, slots, vocab_size] tensor of logits, and what a pass over them leaves in scratch.
struct LogitRows {
  const void* logits;
  int64_t stride[2];  // [batch, slot]
  int64_t count;      // batch * slots
  int slots, vocab_size, tiles;
  // Of each row: the largest logit of every tile and of every group, of every tile the sum of the weights relative to
  // its largest, and room for the sums relative to the row's largest.
  float *tops, *groups, *sums, *masses;
  int* finished;  // [batch], zeroed for the next launch

  template <class T>
  __device__ __forceinline__ const T* row(int64_t index) const {
    const unsigned at = unsigned(index), b = at / unsigned(slots), slot = at % unsigned(slots);
    return static_cast<const T*>(logits) + b * stride[0] + slot * stride[1];
  }
};

// What the law of a row needs besides the largest logits; null where only candidates are wanted.
struct ScanNeeds {
  const float *temperature, *top_p;  // [batch]
  const int32_t* top_k;
};

// Sum of the weights of a tile relative to its largest logit, over the warp.
template <class T>
__device__ __forceinline__ float sum_tile(const typename Tile<T>::Pieces& pieces, float top, float rate, bool clean) {
  using Of = Tile<T>;
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < Of::kLoads; ++i) {
    float x[Of::kVector];
    widen(pieces[i], x);
#pragma unroll
    for (int j = 0; j < Of::kVector; ++j) {
      if (clean)
        sum[j % 4] += x[j] > -INFINITY ? weight_of(x[j], top, rate) : 0.0f;
      else
        sum[j % 4] += exp2_fast((x[j] - top) * rate);
    }
  }
  return lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// One warp reads a tile of a row after another, the next one ahead.
template <class T>
__global__ void __launch_bounds__(kScanThreads, sizeof(T) == 4 ? 2 : 3) scan_rows(const LogitRows rows,
                                                                              const ScanNeeds needs) {
  using Of = Tile<T>;
  release_successor();
  wait_for_predecessor();
  const unsigned warps = gridDim.x * (kScanThreads / 32), tiles = unsigned(rows.tiles), lane = unsigned(lane_index());
  const unsigned first = blockIdx.x * (kScanThreads / 32) + unsigned(warp_index());
  const unsigned row_step = warps / tiles, tile_step = warps % tiles;
  unsigned index = first / tiles, tile = first % tiles;
  typename Of::Pieces ahead;
  if (index < rows.count) load_tile(rows.row<T>(index), rows.vocab_size, int(tile), ahead);
  while (index < rows.count) {
    typename Of::Pieces pieces;
#pragma unroll
    for (int i = 0; i < Of::kLoads; ++i) pieces[i] = ahead[i];
    const unsigned b = index / unsigned(rows.slots), here = index * tiles + tile;
    if (tile == 0 && index % unsigned(rows.slots) == 0 && lane == 0) rows.finished[b] = 0;
    index += row_step, tile += tile_step;
    if (tile >= tiles) tile -= tiles, ++index;
    if (index < rows.count) load_tile(rows.row<T>(index), rows.vocab_size, int(tile), ahead);

    bool groups = true, sums = false;
    float temperature = 0;
    if (needs.temperature != nullptr) {
      temperature = needs.temperature[b];
      const int top_k = needs.top_k[b];
      sums = temperature > 0;
      groups = sums && ((top_k > 0 && top_k < rows.vocab_size) || needs.top_p[b] < 1.0f);
    }
    constexpr int kGroupLanes = kGroup / Of::kVector;
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < Of::kLoads; ++i) {
      float most = largest(pieces[i]);
#pragma unroll
      for (int step = 1; step < kGroupLanes; step *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
      most = no_nan(most);
      if (groups && lane % kGroupLanes == 0)
        rows.groups[int64_t(here) * kTileGroups + i * Of::kVector + lane / kGroupLanes] = most;
      top = fmaxf(top, most);
    }
#pragma unroll
    for (int step = kGroupLanes; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    if (lane == 0) rows.tops[here] = top;
    if (!sums) continue;
    const float rate = rate_of(temperature);
    float sum = sum_tile<T>(pieces, top, rate, false);
    if (!(sum < INFINITY)) sum = sum_tile<T>(pieces, top, rate, true);  // with NaN or infinities
    if (lane == 0) rows.sums[here] = sum;
  }
}

template <class T>
void scan(const LogitRows& rows, const ScanNeeds& needs, const char* name, Stream stream) {
  const int64_t tasks = rows.count * rows.tiles, each = kScanThreads / 32;
  const int64_t resident = int64_t(device_info(stream.device).multiprocessors) * (sizeof(T) == 4 ? 2 : 3);
  const int64_t blocks = (tasks + each - 1) / each;
  launch(name, scan_rows<T>, dim3(unsigned(blocks < resident ? blocks : resident)), dim3(kScanThreads), 0, stream, rows,
         needs);
}

// Takes `count` elements from the front of scratch memory; with a null pointer it only counts.
template <class T>
T* carve(char*& part, int64_t count) {
  T* taken = reinterpret_cast<T*>(part);
  part += (count * int64_t(sizeof(T)) + 255) & ~int64_t(255);
  return taken;
}

inline LogitRows carve_rows(char*& part, int batch, int slots, int vocab_size, const void* logits,
                            const int64_t* stride) {
  const int64_t count = int64_t(batch) * slots, tiles = num_tiles(vocab_size);
  LogitRows rows{logits, {stride[0], stride[1]}, count, slots, vocab_size, int(tiles), nullptr, nullptr, nullptr,
                 nullptr, nullptr};
  rows.tops = carve<float>(part, count * tiles);
  rows.groups = carve<float>(part, count * tiles * kTileGroups);
  rows.sums = carve<float>(part, count * tiles);
  rows.masses = carve<float>(part, count * tiles);
  rows.finished = carve<int>(part, batch);
  return rows;
}

}  // namespace
}  // namespace pydflash::cuda
