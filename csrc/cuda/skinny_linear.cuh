// The kernel of skinny_linear, from Hopper on: rows of the weights are the wide side of a matrix product, the few rows
// of x ("tokens") its narrow one. Sums are added in one order whatever the number of tokens.
//
// A tile is `2 * half` rows of the weights, each half from one weight; gated tiles take the same rows of both. One warp
// loads stages of 128 columns, four multiply 16 rows each. Two blocks of a cluster ("ranks") may share a tile's columns:
// each then finishes half of the tokens with what the other one sends it.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/tensor_core.cuh"

namespace pydflash::cuda {

constexpr int kTileRows = 64, kSkinnyWarps = kTileRows / 16, kSkinnyThreads = 32 * (kSkinnyWarps + 1);
constexpr int kColumns = 64, kPieces = 2;  // a piece in shared memory has rows of 128 bytes, swizzled
constexpr int kMostStages = 16;

struct SkinnyPlan {
  CUtensorMap x_map, weight_maps[3];
  SkinnyLinearParams p;
  int tiles, half, chunks;  // chunks: stages of columns a tile
  int ranks, stages;
  float balance;  // the share of the multiprocessors' turns that is work
  bool paired;    // two neighbours of a row of out are one aligned word

  __host__ __device__ int piece_bytes(int tokens) const { return (2 * half + tokens) * 2 * kColumns; }
  __host__ __device__ int stage_bytes(int tokens) const { return kPieces * piece_bytes(tokens); }
};

// What is in shared memory beside the stages: a part of a sum for each warp and lane, then the barriers.
constexpr int kSentBytes = kSkinnyWarps * 32 * int(sizeof(float4));
constexpr int kFixedBytes = kSentBytes + 8 * (2 * kMostStages + 2 * kSkinnyWarps);

#if __CUDA_ARCH__ >= 900
namespace skinny {

struct Rows {
  int weight, first;  // the rows from `first` on
};

__device__ __forceinline__ Rows rows_of(const SkinnyPlan& plan, int tile, int half) {
  if (plan.p.gated) return {half, tile * plan.half};
  int at = 2 * tile + half, weight = 0;
  for (; weight + 1 < plan.p.num_weights; ++weight) {
    const int halves = (plan.p.out_features[weight] + plan.half - 1) / plan.half;
    if (at < halves) break;
    at -= halves;
  }
  return {weight, at * plan.half};
}

// What a block works on: tiles first, first + step, ...; of each the chunks from begin to end.
struct Share {
  int first, step, tiles, begin, end;
};

// Where the buffers and barriers of a block are in shared memory.
template <int kTokens>
struct Shared {
  const SkinnyPlan& plan;
  uint32_t base;
  __device__ uint32_t stage(int i) const { return base + i * plan.stage_bytes(kTokens); }
  __device__ uint32_t piece(int i, int n) const { return stage(i) + n * plan.piece_bytes(kTokens); }
  __device__ uint32_t tokens(int i, int n) const { return piece(i, n) + 2 * plan.half * 2 * kColumns; }
  __device__ uint32_t sent(int warp, int lane) const { return stage(plan.stages) + (warp * 32 + lane) * 16; }
  __device__ uint32_t full(int i) const { return stage(plan.stages) + kSentBytes + 8 * i; }
  __device__ uint32_t empty(int i) const { return full(kMostStages + i); }
  __device__ uint32_t arrived(int warp) const { return full(2 * kMostStages + warp); }
  __device__ uint32_t taken(int warp) const { return full(2 * kMostStages + kSkinnyWarps + warp); }
};

// The first lane of the loading warp. Weights are constant, so the first of them come before the predecessor's end.
template <int kTokens>
__device__ void load_stages(const SkinnyPlan& plan, const Shared<kTokens>& shared, const Share& share) {
  constexpr int kStep = kPieces * kColumns;
  const uint64_t once = evict_first_policy(), usual = usual_policy();
  const auto load_x = [&](int stage, int chunk) {
#pragma unroll
    for (int n = 0; n < kPieces; ++n)
      copy_box(shared.tokens(stage, n), &plan.x_map, chunk * kStep + n * kColumns, 0, shared.full(stage), usual);
  };
  const int bytes = plan.stage_bytes(plan.p.rows);
  const int count = share.tiles * (share.end - share.begin), early = count < plan.stages ? count : plan.stages;
  Rows rows[2];
  for (int i = 0, stage = 0, parity = 1, tile = share.first, chunk = share.begin; i < count; ++i) {
    if (chunk == share.begin) rows[0] = rows_of(plan, tile, 0), rows[1] = rows_of(plan, tile, 1);
    if (i >= plan.stages) wait_for_phase(shared.empty(stage), parity);
    arrive_expecting(shared.full(stage), bytes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kPieces; ++n)
        copy_box(shared.piece(stage, n) + half * plan.half * 2 * kColumns, &plan.weight_maps[rows[half].weight],
                 chunk * kStep + n * kColumns, rows[half].first, shared.full(stage), once);
    }
    if (i >= early) load_x(stage, chunk);
    if (i + 1 == early) {
      wait_for_predecessor();
      for (int j = 0, at = share.begin; j < early; ++j) {
        load_x(j, at);
        if (++at == share.end) at = share.begin;
      }
    }
    if (++stage == plan.stages) stage = 0, parity ^= 1;
    if (++chunk == share.end) chunk = share.begin, tile += share.step;
  }
}

// A multiplying warp: rows [16 * warp, + 16) of each tile, or 8 rows of either half where gated.
template <class T, int kTokens>
struct Multiplier {
  static constexpr int kParts = kTokens / 8;  // float4 of the sum that a lane holds: 2 rows by 2 tokens
  const SkinnyPlan& plan;
  const Shared<kTokens>& shared;
  int warp, lane, rank;
  float sum[kParts][4];

  __device__ bool works() const { return warp * 8 < plan.half; }

  // The first row in a tile of the lower or upper 8 of the warp's rows.
  __device__ int tile_row(int upper) const {
    return plan.p.gated ? upper * plan.half + warp * 8 : warp * 16 + upper * 8;
  }

  __device__ void multiply_stage(int stage) {
    const int row = lane % 8, weight_row = (tile_row(lane / 8 % 2) + row) * 2 * kColumns;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const uint32_t weights = shared.piece(stage, n) + weight_row, tokens = shared.tokens(stage, n);
      constexpr int kSteps = kColumns / 16, kLoads = kSteps * kParts / 2;
      uint32_t w[kSteps][4], x[kLoads][4];  // all are loaded before the first is used
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_matrices(w[step], weights + ((2 * step + lane / 16) ^ row) * 16);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (kParts == 1)  // two steps of 8 tokens
          load_matrices(x[i], tokens + row * 2 * kColumns + ((4 * i + lane / 8) ^ row) * 16);
        else  // a step of 16
          load_matrices(x[i], tokens + (lane / 16 * 8 + row) * 2 * kColumns + ((2 * i + lane / 8 % 2) ^ row) * 16);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const uint32_t(&of)[4] = x[(step * kParts + i) / 2];
          const int half = (step * kParts + i) % 2 * 2;
          multiply<T>(sum[i], w[step], of[half], of[half + 1]);
        }
      }
    }
  }

  __device__ bool owns(int part) const { return plan.ranks == 1 || part % 2 == rank; }

  // Sends the part that the other rank finishes, and adds what that one sends.
  __device__ void add_ranks(int turn) {
    if (plan.ranks == 1) return;
    if (turn > 0) wait_for_rank(shared.taken(warp), (turn - 1) & 1);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (!owns(i)) store_to_rank(in_rank(shared.sent(warp, lane), rank ^ 1), {sum[i][0], sum[i][1], sum[i][2], sum[i][3]});
    }
    __syncwarp();
    if (lane == 0) arrive_in_rank(in_rank(shared.arrived(warp), rank ^ 1));
    wait_for_rank(shared.arrived(warp), turn & 1);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (!owns(i)) continue;
      const float4 other = read_shared(shared.sent(warp, lane));
      sum[i][0] += other.x, sum[i][1] += other.y, sum[i][2] += other.z, sum[i][3] += other.w;
    }
    __syncwarp();
    if (lane == 0) arrive_in_rank(in_rank(shared.taken(warp), rank ^ 1));
  }

  // Where 8 rows of a tile go: the weight, its rows from `row` on, and the column of out of the first.
  struct Place {
    int weight, row, column, left;
  };

  __device__ Place place_of(int tile, int upper) const {
    const SkinnyLinearParams& p = plan.p;
    const int at = tile_row(upper), half = at >= plan.half;
    const Rows rows = rows_of(plan, tile, half);
    const int row = rows.first + at - half * plan.half;
    int before = 0;
    for (int i = 0; i < rows.weight && !p.gated; ++i) before += p.out_features[i];
    return {rows.weight, row, before + row, p.out_features[rows.weight] - row};
  }

  __device__ float bias_of(const Place& place) const {
    const T* bias = static_cast<const T*>(plan.p.biases[place.weight]);
    return bias != nullptr && lane / 4 < place.left ? to_float(bias[place.row + lane / 4]) : 0.0f;
  }

  // silu(gate) * factor of two tokens, rounded as three modules would.
  __device__ static uint32_t gated(float gate0, float gate1, float factor0, float factor1) {
    widen_pair(T{}, narrow_pair(T{}, gate0, gate1), gate0, gate1);
    widen_pair(T{}, narrow_pair(T{}, factor0, factor1), factor0, factor1);
    widen_pair(T{}, narrow_pair(T{}, gate0 / (1 + expf(-gate0)), gate1 / (1 + expf(-gate1))), gate0, gate1);
    return narrow_pair(T{}, gate0 * factor0, gate1 * factor1);
  }

  // An 8 x 8 matrix of results, rows of the weight by tokens, to out: two neighbours of one token a lane.
  __device__ void store_matrix(uint32_t matrix, int part, const Place& place) const {
    matrix = transposed(matrix);
    const int token = part * 8 + lane / 4, left = place.left - lane % 4 * 2;
    if (token >= plan.p.rows || left <= 0) return;
    uint16_t* out = static_cast<uint16_t*>(plan.p.out) + token * plan.p.out_stride + place.column + lane % 4 * 2;
    if (plan.paired) {
      *reinterpret_cast<uint32_t*>(out) = matrix;
    } else {
      out[0] = uint16_t(matrix);
      if (left > 1) out[1] = uint16_t(matrix >> 16);
    }
  }

  __device__ void store_tile(int tile) {
    const Place lower = place_of(tile, 0), upper = place_of(tile, 1);
    const float lower_bias = bias_of(lower), upper_bias = bias_of(upper);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (!owns(i)) continue;
      const float low0 = sum[i][0] + lower_bias, low1 = sum[i][1] + lower_bias;
      const float up0 = sum[i][2] + upper_bias, up1 = sum[i][3] + upper_bias;
      if (plan.p.gated) {
        store_matrix(gated(low0, low1, up0, up1), i, lower);
      } else {
        store_matrix(narrow_pair(T{}, low0, low1), i, lower);
        store_matrix(narrow_pair(T{}, up0, up1), i, upper);
      }
    }
  }

  __device__ void run(const Share& share) {
    int stage = 0, parity = 0;
    for (int turn = 0, tile = share.first; turn < share.tiles; ++turn, tile += share.step) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
      for (int chunk = share.begin; chunk < share.end; ++chunk) {
        wait_for_phase(shared.full(stage), parity);
        if (works()) multiply_stage(stage);
        __syncwarp();
        if (lane == 0) arrive(shared.empty(stage));
        if (++stage == plan.stages) stage = 0, parity ^= 1;
      }
      if (!works()) continue;
      add_ranks(turn);
      store_tile(tile);
    }
  }
};

}  // namespace skinny
#endif

template <class T, int kTokens>
__global__ void __launch_bounds__(kSkinnyThreads) skinny_linear_kernel(const __grid_constant__ SkinnyPlan plan) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) uint8_t memory[];
  release_successor();
  const skinny::Shared<kTokens> shared{plan, shared_address(memory)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % plan.ranks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.stages; ++i) {
      init_barrier(shared.full(i), 1);
      init_barrier(shared.empty(i), kSkinnyWarps);
    }
    for (int i = 0; i < kSkinnyWarps; ++i) {
      init_barrier(shared.arrived(i), 1);
      init_barrier(shared.taken(i), 1);
    }
    fence_barriers();
  }
  __syncthreads();
  if (plan.ranks > 1) cluster_arrive();
  skinny::Share share{int(blockIdx.x) / plan.ranks, int(gridDim.x) / plan.ranks};
  share.tiles = max((plan.tiles - share.first + share.step - 1) / share.step, 0);
  share.begin = plan.chunks * rank / plan.ranks, share.end = plan.chunks * (rank + 1) / plan.ranks;
  if (warp == kSkinnyWarps) {
    if (lane < plan.p.num_weights) prefetch_map(plan.weight_maps[lane]);
    if (lane == 3) prefetch_map(plan.x_map);
    if (lane == 0) skinny::load_stages(plan, shared, share);
    __syncwarp();
    if (plan.ranks > 1) cluster_wait();
  } else {
    wait_for_predecessor();
    if (plan.ranks > 1) cluster_wait();  // the barriers of both ranks are ready
    skinny::Multiplier<T, kTokens> multiplier{plan, shared, warp, lane, rank};
    multiplier.run(share);
  }
  if (plan.ranks > 1) cluster_arrive(), cluster_wait();  // nobody leaves while the other reaches into its memory
#endif
}

}  // namespace pydflash::cuda
