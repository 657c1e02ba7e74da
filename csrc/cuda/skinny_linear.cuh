// The kernel of skinny_linear. Weight rows are the wide side of a matrix product, the tokens of x the narrow one.
//
// A tile is `2 * half` rows of the weights, each half from one weight; gated tiles take the same rows of both. The
// blocks of a cluster share a tile's columns and add up their sums in each other's shared memory, in their order.
#pragma once

#include "cuda/skinny_linear_ptx.cuh"

namespace pydflash::cuda {

constexpr int kColumns = 64;  // of a piece of a tile in shared memory: rows of 128 bytes, swizzled in groups of 8
constexpr int kMostStages = 16;
#ifdef SK_TRACE
#define MARK(n) do { if (a.trace) { unsigned long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); a.trace[blockIdx.x * 8 + (n)] = t; } } while (0)
#else
#define MARK(n)
#endif

struct SkinnyArguments {
  CUtensorMap x_map, weight_maps[3];  // used from Hopper on
  SkinnyLinearParams p;
  int tiles, half, chunks;  // chunks of columns a tile
  int ranks, rank_shift, rank_parts;  // blocks a cluster, its logarithm, and the parts of a sum that each finishes
  int stages, piece_bytes, stage_bytes, rank_bytes;
  bool paired;  // two neighbours of a row of out are one aligned word
  int knob_prefetch, knob_late, knob_evict;
  unsigned long long* trace;
};

// kRowWarps x kDepthWarps warps multiply, each kRowTiles x 16 rows and its share of the columns; one more loads.
template <class T, int kTokens_, int kRowTiles_, int kRowWarps_, int kDepthWarps_, int kPieces_>
struct SkinnyShape {
  using Type = T;
  static constexpr bool kGroup = kDepthWarps_ == 0;  // a warpgroup multiplies
  static constexpr int kTokens = kTokens_, kRowTiles = kRowTiles_, kRowWarps = kRowWarps_;
  static constexpr int kDepthWarps = kGroup ? 1 : kDepthWarps_, kPieces = kPieces_;
  static constexpr int kTileRows = 16 * kRowTiles * kRowWarps;  // at most; tiles may be lower
  static constexpr int kWarps = kRowWarps * kDepthWarps, kThreads = 32 * (kWarps + 1);
  static constexpr int kNarrow = kTokens / 8, kParts = kRowTiles * kNarrow;  // float4 a thread holds of the sum
  static constexpr int kDepthBytes = (kDepthWarps - 1) * kRowWarps * kParts * 512;
  static constexpr int kBarriers = 2 * kMostStages + 2 * kRowWarps;
};

namespace skinny {

struct Rows {
  int weight, first;  // the rows from `first` on
};

__device__ __forceinline__ Rows rows_of(const SkinnyArguments& a, int tile, int half) {
  if (a.p.gated) return {half, tile * a.half};
  int at = 2 * tile + half, weight = 0;
  for (; weight + 1 < a.p.num_weights; ++weight) {
    const int halves = (a.p.out_features[weight] + a.half - 1) / a.half;
    if (at < halves) break;
    at -= halves;
  }
  return {weight, at * a.half};
}

// What a block works on: tiles first, first + step, ...; of each the chunks from begin to end.
struct Share {
  int first, step, tiles, begin, end;
};

// Where the barriers and buffers of a block are in shared memory.
template <class S>
struct Shared {
  const SkinnyArguments& a;
  uint32_t base;
  __device__ uint32_t stage(int i) const { return base + i * a.stage_bytes; }
  __device__ uint32_t from_depths() const { return stage(a.stages); }
  __device__ uint32_t from_ranks() const { return from_depths() + S::kDepthBytes; }
  __device__ uint32_t full(int i) const { return from_ranks() + S::kRowWarps * a.rank_bytes + 8 * i; }
  __device__ uint32_t empty(int i) const { return full(kMostStages + i); }
  __device__ uint32_t sums_here(int warp) const { return full(2 * kMostStages + warp); }
  __device__ uint32_t sums_taken(int warp) const { return full(2 * kMostStages + S::kRowWarps + warp); }
};

// The loading warp.
template <class S>
struct Loader {
  const SkinnyArguments& a;
  Shared<S> shared;
  int lane;
  Rows rows[2];
#if __CUDA_ARCH__ >= 900
  static constexpr int kArrivals = 1;
  uint64_t weight_policy, x_policy;

  __device__ bool loads() {
    weight_policy = a.knob_evict & 1 ? evict_first_policy() : 0x1000000000000000ull;
    x_policy = a.knob_evict & 2 ? evict_last_policy() : 0x1000000000000000ull;
    if (lane < 4) asm volatile("prefetch.tensormap [%0];" ::"l"(lane < 3 ? &a.weight_maps[lane] : &a.x_map) : "memory");
    return lane == 0;
  }

  __device__ void weights(int stage, int column) {
    const uint32_t barrier = shared.full(stage);
    barrier_expect(barrier, S::kPieces * (2 * a.half + S::kTokens) * 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const CUtensorMap* map = &a.weight_maps[rows[half].weight];
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece)
        copy_box(shared.stage(stage) + piece * a.piece_bytes + half * a.half * 128, map, column + piece * kColumns,
                 rows[half].first, barrier, weight_policy);
    }
  }

  __device__ void x(int stage, int column) {
#pragma unroll
    for (int piece = 0; piece < S::kPieces; ++piece)
      copy_box(shared.stage(stage) + piece * a.piece_bytes + 2 * a.half * 128, &a.x_map, column + piece * kColumns,
               0, shared.full(stage), x_policy);
  }
#else
  static constexpr int kArrivals = 32;

  __device__ bool loads() { return true; }

  // 4 rows at a time, 8 lanes each.
  __device__ void copy_rows(uint32_t to, const void* from, int first, int count, int limit, int64_t stride, int column) {
    const int at = column + lane % 8 * 8;
    for (int row = lane / 8; row < count; row += 4) {
      const bool inside = first + row < limit && at < a.p.in_features;
      const uint16_t* source = static_cast<const uint16_t*>(from) + (inside ? (first + row) * stride + at : 0);
      copy_16(to + row * 128 + (lane % 8 ^ row % 8) * 16, source, inside ? 16 : 0);
    }
  }

  __device__ void weights(int stage, int column) {
    for (int half = 0; half < 2; ++half) {
      for (int piece = 0; piece < S::kPieces; ++piece)
        copy_rows(shared.stage(stage) + piece * a.piece_bytes + half * a.half * 128, a.p.weights[rows[half].weight],
                  rows[half].first, a.half, a.p.out_features[rows[half].weight], a.p.in_features,
                  column + piece * kColumns);
    }
  }

  __device__ void x(int stage, int column) {
    for (int piece = 0; piece < S::kPieces; ++piece)
      copy_rows(shared.stage(stage) + piece * a.piece_bytes + 2 * a.half * 128, a.p.x, 0, S::kTokens, a.p.rows,
                a.p.x_stride, column + piece * kColumns);
    barrier_arrive_after_copies(shared.full(stage));
  }
#endif

  // Weights are constant, so the first of them come before the predecessor's end; x does not.
  __device__ void run(const Share& share) {
    constexpr int kStep = S::kPieces * kColumns;
    const int width = share.end - share.begin, count = share.tiles * width;
    const int early = count < a.stages ? count : a.stages;
    for (int i = 0, stage = 0, parity = 1, tile = share.first, chunk = share.begin; i < count; ++i) {
      if (chunk == share.begin) rows[0] = rows_of(a, tile, 0), rows[1] = rows_of(a, tile, 1);
      if (i >= a.stages) barrier_wait(shared.empty(stage), parity);
      weights(stage, chunk * kStep);
      if (i >= early) x(stage, chunk * kStep);
      if (i + 1 == early) {
        wait_for_predecessor();
        MARK(1);
        for (int j = 0, at = share.begin; j < early; ++j) {
          x(j, at * kStep);
          if (++at == share.end) at = share.begin;
        }
      }
      if (a.knob_late && i + a.knob_late == count) release_successor();
      if (++stage == a.stages) stage = 0, parity ^= 1;
      if (++chunk == share.end) chunk = share.begin, tile += share.step;
    }
    MARK(3);
  }
};

// A multiplying warp.
template <class S>
struct Multiplier {
  using T = typename S::Type;
  const SkinnyArguments& a;
  Shared<S> shared;
  uint8_t* memory;  // that shared describes
  int lane, row_warp, depth_warp, rank;
  float4 sum[S::kParts];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < S::kParts; ++i) sum[i] = {0, 0, 0, 0};
  }

  // The first row in a tile of the 8 rows in part `high` of a 16-row tile of the warp; gated: a gate's or its factor's.
  __device__ int tile_row(int row_tile, int high) const {
    if (S::kGroup) return row_tile * (a.p.gated ? a.half : 64) + row_warp * 16 + high * 8;
    const int at = row_warp * S::kRowTiles + row_tile;
    return a.p.gated ? high * a.half + at * 8 : at * 16 + high * 8;
  }

  __device__ bool inside(int row_tile) const {
    if (S::kGroup) return true;
    return (row_warp * S::kRowTiles + row_tile) * 8 < a.half;
  }

  __device__ void multiply_stage(uint32_t base) {
#if __CUDA_ARCH__ >= 900
    if constexpr (S::kGroup) {
      const auto descriptor = [](uint32_t at) { return uint64_t(at >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62; };
      const uint32_t apart = (a.p.gated ? a.half : 64) * 8;
      group_fence();
#pragma unroll
      for (int piece = 0; piece < S::kPieces; ++piece) {
        const uint64_t w = descriptor(base + piece * a.piece_bytes), x = descriptor(base + piece * a.piece_bytes + 2 * a.half * 128);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int t = 0; t < S::kRowTiles; ++t) group_multiply<S::kTokens>(sum + t * S::kNarrow, w + t * apart + 2 * k, x + 2 * k);
      }
      group_wait();
      return;
    }
#endif
    const int row = lane % 8;
    uint32_t rows[S::kRowTiles];
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t) rows[t] = (tile_row(inside(t) ? t : 0, lane / 8 % 2) + row) * 128;
#pragma unroll
    for (int pair = 0; pair < 2 * S::kPieces; pair += S::kDepthWarps) {
      const int at = pair + (S::kDepthWarps > 1 ? depth_warp : 0);
      const uint32_t piece = base + at / 2 * a.piece_bytes;
      const int column = at % 2 * 4;  // in units of 16 bytes
      uint32_t w[2][S::kRowTiles][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int t = 0; t < S::kRowTiles; ++t)
          load_matrices(w[step][t], piece + rows[t] + ((column + 2 * step + lane / 16) ^ row) * 16);
      }
      const uint32_t tokens = piece + 2 * a.half * 128;
      if (S::kTokens == 8) {
        uint32_t x[4];
        load_matrices(x, tokens + row * 128 + ((column + lane / 8) ^ row) * 16);
#pragma unroll
        for (int t = 0; t < S::kRowTiles; ++t) {
          multiply<T>(sum[t], w[0][t], x[0], x[1]);
          multiply<T>(sum[t], w[1][t], x[2], x[3]);
        }
      } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int n = 0; n < S::kTokens / 16; ++n) {
            uint32_t x[4];
            load_matrices(x, tokens + (n * 16 + lane / 16 * 8 + row) * 128 +
                                 ((column + 2 * step + lane / 8 % 2) ^ row) * 16);
#pragma unroll
            for (int t = 0; t < S::kRowTiles; ++t) {
              multiply<T>(sum[t * S::kNarrow + 2 * n], w[step][t], x[0], x[1]);
              multiply<T>(sum[t * S::kNarrow + 2 * n + 1], w[step][t], x[2], x[3]);
            }
          }
        }
      }
    }
  }

  __device__ static void add(float4& to, const float4& from) {
    to.x += from.x, to.y += from.y, to.z += from.z, to.w += from.w;
  }

  __device__ static float4 read(const void* at) { return *static_cast<const float4*>(at); }

  // Adds the depth warps' sums into the first one's; true in that one.
  __device__ bool add_depths() {
    if (S::kDepthWarps == 1) return true;
    uint8_t* own = memory + (shared.from_depths() - shared.base) + (row_warp * S::kParts * 32 + lane) * 16;
    constexpr int kStep = S::kRowWarps * S::kParts * 512;
    if (depth_warp > 0) {
#pragma unroll
      for (int i = 0; i < S::kParts; ++i)
        *reinterpret_cast<float4*>(own + (depth_warp - 1) * kStep + i * 512) = sum[i];
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::kWarps * 32) : "memory");
    if (depth_warp == 0) {
#pragma unroll
      for (int d = 0; d < S::kDepthWarps - 1; ++d) {
#pragma unroll
        for (int i = 0; i < S::kParts; ++i) add(sum[i], read(own + d * kStep + i * 512));
      }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::kWarps * 32) : "memory");
    return depth_warp == 0;
  }

  // A rank finishes every a.ranks-th column of parts; place: of part i among those.
  __device__ int owner_of(int i) const { return i % S::kNarrow & (a.ranks - 1); }
  __device__ int place_of(int i) const { return (i % S::kNarrow >> a.rank_shift) * S::kRowTiles + i / S::kNarrow; }
  __device__ bool owns(int i) const { return owner_of(i) == rank; }

  // Sends every part to the rank that owns it and adds up the own ones, in the order of the ranks.
  __device__ void add_ranks(int turn) {
#if __CUDA_ARCH__ >= 900
    if (a.ranks == 1) return;
    const uint32_t here = shared.from_ranks() + row_warp * a.rank_bytes + lane * 16;
    if (turn > 0) barrier_wait_for_ranks(shared.sums_taken(row_warp), (turn - 1) & 1);
#pragma unroll
    for (int i = 0; i < S::kParts; ++i) {
      const int owner = owner_of(i);
      if (owner == rank) continue;
      const int place = (rank < owner ? rank : rank - 1) * a.rank_parts + place_of(i);
      store_to_rank(in_rank(here + place * 512, owner), sum[i]);
    }
    __syncwarp();
    if (lane < a.ranks && lane != rank) barrier_arrive_in_rank(in_rank(shared.sums_here(row_warp), lane));
    barrier_wait_for_ranks(shared.sums_here(row_warp), turn & 1);
    const uint8_t* sums = memory + (here - shared.base);
#pragma unroll
    for (int i = 0; i < S::kParts; ++i) {
      if (!owns(i)) continue;
      const float4 own = sum[i];
      sum[i] = {0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (r >= a.ranks) continue;
        const int place = (r < rank ? r : r - 1) * a.rank_parts + place_of(i);
        add(sum[i], r == rank ? own : read(sums + place * 512));
      }
    }
    __syncwarp();
    if (lane < a.ranks && lane != rank) barrier_arrive_in_rank(in_rank(shared.sums_taken(row_warp), lane));
#endif
  }

  // silu(gate) * factor of two tokens, rounded as three modules would.
  __device__ static uint32_t gated(float gate0, float gate1, float factor0, float factor1) {
    unpack<T>(pack<T>(gate0, gate1), gate0, gate1);
    unpack<T>(pack<T>(factor0, factor1), factor0, factor1);
    unpack<T>(pack<T>(gate0 / (1 + expf(-gate0)), gate1 / (1 + expf(-gate1))), gate0, gate1);
    return pack<T>(gate0 * factor0, gate1 * factor1);
  }

  // Where the results of 8 rows of a tile go: out's columns from `column` on, `left` of them.
  struct Target {
    int column, left;
  };
  Target target[S::kRowTiles][2];

  __device__ void find_targets(int tile) {
    const SkinnyLinearParams& p = a.p;
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int at = tile_row(t, high), half = at >= a.half;
        const Rows rows = rows_of(a, tile, half);
        const int row = rows.first + at - half * a.half;
        const int before = p.gated || rows.weight == 0 ? 0 : p.out_features[0] + (rows.weight > 1 ? p.out_features[1] : 0);
        const bool none = S::kGroup ? at >= (p.gated ? (t + 1) * a.half : 2 * a.half) : !inside(t);
        target[t][high] = {before + row, none ? 0 : p.out_features[rows.weight] - row};
      }
    }
  }

  // The bias of this lane's row.
  __device__ float bias_of(int t, int high) const {
    const Target& to = target[t][high];
    if (lane / 4 >= to.left) return 0;
    int weight = 0, at = to.column + lane / 4;
    if (a.p.gated) weight = S::kGroup ? t : high;
    else while (at >= a.p.out_features[weight]) at -= a.p.out_features[weight++];
    return a.p.biases[weight] ? to_float(static_cast<const T*>(a.p.biases[weight])[at]) : 0.0f;
  }

  // An 8 x 8 matrix of results, rows of the weight by tokens, to out: two neighbours of one token a lane.
  __device__ void store_matrix(uint32_t matrix, int n, uint16_t* out, const Target& to) const {
    matrix = transposed(matrix);
    const int left = to.left - lane % 4 * 2;
    if (n * 8 + lane / 4 >= a.p.rows || left <= 0) return;
    out += to.column + n * 8 * a.p.out_stride;
    if (a.paired) {
      *reinterpret_cast<uint32_t*>(out) = matrix;
    } else {
      out[0] = uint16_t(matrix);
      if (left > 1) out[1] = uint16_t(matrix >> 16);
    }
  }

  __device__ void store_tile() {
    const bool biased = a.p.biases[0] || a.p.biases[1] || a.p.biases[2];
    uint16_t* out = static_cast<uint16_t*>(a.p.out) + lane / 4 * a.p.out_stride + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t) {
      if (biased) {
        const float low = bias_of(t, 0), high = bias_of(t, 1);
#pragma unroll
        for (int n = 0; n < S::kNarrow; ++n) add(sum[t * S::kNarrow + n], {low, low, high, high});
      }
    }
#pragma unroll
    for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
      for (int n = 0; n < S::kNarrow; ++n) {
        if (!owns(n)) continue;
        const float4 y = sum[t * S::kNarrow + n];
        if (!a.p.gated) {
          store_matrix(pack<T>(y.x, y.y), n, out, target[t][0]);
          store_matrix(pack<T>(y.z, y.w), n, out, target[t][1]);
        } else if (!S::kGroup) {
          store_matrix(gated(y.x, y.y, y.z, y.w), n, out, target[t][0]);
        } else if (t == 0) {
          const float4 up = sum[S::kNarrow + n];
          store_matrix(gated(y.x, y.y, up.x, up.y), n, out, target[0][0]);
          store_matrix(gated(y.z, y.w, up.z, up.w), n, out, target[0][1]);
        }
      }
    }
  }

  __device__ void run(const Share& share) {
    int stage = 0, parity = 0;
    const bool works = inside(0);
    for (int turn = 0, tile = share.first; turn < share.tiles; ++turn, tile += share.step) {
      clear();
      find_targets(tile);
      for (int chunk = share.begin; chunk < share.end; ++chunk) {
        barrier_wait(shared.full(stage), parity);
        if (turn == 0 && chunk == share.begin && lane == 0 && row_warp + depth_warp == 0) MARK(2);
        if (works) multiply_stage(shared.stage(stage));
        __syncwarp();
        if (lane == 0) barrier_arrive(shared.empty(stage));
        if (++stage == a.stages) stage = 0, parity ^= 1;
      }
      if (!add_depths() || !works) continue;
      if (turn == share.tiles - 1 && lane == 0 && row_warp == 0) MARK(4);
      add_ranks(turn);
      if (turn == share.tiles - 1 && lane == 0 && row_warp == 0) MARK(5);
      store_tile();
      if (turn == share.tiles - 1 && lane == 0 && row_warp == 0) MARK(6);
    }
  }
};

}  // namespace skinny

template <class S>
__global__ void __launch_bounds__(S::kThreads, 2) skinny_linear_kernel(const __grid_constant__ SkinnyArguments a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  if (threadIdx.x == 0) MARK(0);
  if (!a.knob_late) release_successor();
  const skinny::Shared<S> shared{a, shared_address(memory)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % a.ranks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; ++i) {
      barrier_init(shared.full(i), skinny::Loader<S>::kArrivals);
      barrier_init(shared.empty(i), S::kWarps);
    }
    for (int i = 0; i < S::kRowWarps && a.ranks > 1; ++i) {
      barrier_init(shared.sums_here(i), a.ranks - 1);
      barrier_init(shared.sums_taken(i), a.ranks - 1);
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (a.ranks > 1) cluster_arrive();
#endif
  skinny::Share share{int(blockIdx.x) / a.ranks, int(gridDim.x) / a.ranks};
  share.tiles = (a.tiles - share.first + share.step - 1) / share.step;
  share.begin = a.chunks * rank / a.ranks, share.end = a.chunks * (rank + 1) / a.ranks;
  if (warp == S::kWarps) {
    skinny::Loader<S> loader{a, shared, lane};
    if (loader.loads()) loader.run(share);
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (a.ranks > 1) cluster_wait();
#endif
  } else {
#if __CUDA_ARCH__ >= 900
    if (a.knob_prefetch) {
      const int first = (share.begin + a.stages) * S::kPieces * kColumns, last = min(a.p.in_features, min(first + a.knob_prefetch * S::kPieces * kColumns, share.end * S::kPieces * kColumns));
      for (int r = threadIdx.x; r < 2 * a.half; r += S::kWarps * 32) {
        const skinny::Rows rows = skinny::rows_of(a, share.first, r >= a.half);
        const int row = rows.first + (r >= a.half ? r - a.half : r);
        const uint16_t* from = static_cast<const uint16_t*>(a.p.weights[rows.weight]) + int64_t(row) * a.p.in_features;
        if (row < a.p.out_features[rows.weight])
          for (int c = first; c < last; c += kColumns) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
      }
    }
#endif
    wait_for_predecessor();
#if __CUDA_ARCH__ >= 900
    if (a.ranks > 1) cluster_wait();  // the barriers of all ranks are ready
#endif
    skinny::Multiplier<S> multiplier{a, shared, memory, lane, warp % S::kRowWarps, warp / S::kRowWarps, rank};
    multiplier.run(share);
  }
#if __CUDA_ARCH__ >= 900
  if (a.ranks > 1) cluster_arrive(), cluster_wait();  // nobody leaves while others reach into its memory
#endif
}

}  // namespace pydflash::cuda
