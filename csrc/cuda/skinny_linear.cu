#include "cuda/skinny_linear.cuh"

#include <algorithm>

#include "cuda/tensor_map.cuh"

namespace pydflash::cuda {
namespace {

// So much that no second block fits: the scheduler would put two on one multiprocessor and none on another.
constexpr int kStageMemory = 150 * 1024;
constexpr int kDeep = 2048;   // columns from which two blocks share them
constexpr int kTileCost = 8;  // what a tile costs beside its rows, in rows

// By the weights' shapes alone: a sum is added in the same order for every number of tokens.
SkinnyPlan plan_for(const SkinnyLinearParams& p, int tokens, const DeviceInfo& info) {
  SkinnyPlan plan{};
  plan.p = p;
  int64_t rows = 0;
  for (int i = 0; i < p.num_weights; ++i) rows += p.out_features[i];
  plan.ranks = p.in_features >= kDeep && rows <= int64_t(kTileRows) * (info.multiprocessors / 2) ? 2 : 1;
  const int clusters = info.multiprocessors / plan.ranks;
  int64_t least = INT64_MAX;
  for (int half = 8; 2 * half <= kTileRows; half += 8) {
    int halves = 0;
    for (int i = 0; i < p.num_weights; ++i) halves += (p.out_features[i] + half - 1) / half;
    const int tiles = (halves + 1) / 2, turns = (tiles + clusters - 1) / clusters;
    const int64_t cost = int64_t(turns) * (2 * half + kTileCost);
    if (cost > least) continue;
    least = cost, plan.half = half, plan.tiles = tiles;
    plan.balance = float(rows) / float(int64_t(clusters) * turns * 2 * half);
  }
  plan.chunks = (p.in_features + kPieces * kColumns - 1) / (kPieces * kColumns);
  const int memory = std::min(kStageMemory, info.shared_bytes) - kFixedBytes;
  plan.stages = std::min(kMostStages, memory / plan.stage_bytes(tokens));
  plan.paired = reinterpret_cast<uintptr_t>(p.out) % 4 == 0 && p.out_stride % 2 == 0;
  for (int i = 0; i < p.num_weights; ++i) plan.paired = plan.paired && p.out_features[i] % 2 == 0;
  return plan;
}

void make_map(CUtensorMap* map, const SkinnyLinearParams& p, const void* data, int64_t rows, int64_t stride,
              int box_rows) {
  if (!make_tensor_map<2>(map, p.dtype, data, {p.in_features, rows}, {stride}, {kColumns, box_rows}))
    throw std::runtime_error("skinny_linear: the driver takes no tensor map of these shapes");
}

template <class T, int kTokens>
void run(const SkinnyLinearParams& p, Stream stream) {
  const DeviceInfo& info = device_info(stream.device);
  SkinnyPlan plan = plan_for(p, kTokens, info);
  for (int i = 0; i < p.num_weights; ++i)
    make_map(&plan.weight_maps[i], p, p.weights[i], p.out_features[i], p.in_features, plan.half);
  make_map(&plan.x_map, p, p.x, p.rows, p.x_stride, p.rows);  // rows beyond those hold anything
  const int clusters = std::min(info.multiprocessors / plan.ranks, plan.tiles);
  launch_clusters("skinny_linear", skinny_linear_kernel<T, kTokens>, plan.ranks, clusters * plan.ranks,
                  kSkinnyThreads, plan.stages * plan.stage_bytes(kTokens) + kFixedBytes, stream, plan);
}

template <class T>
void run(const SkinnyLinearParams& p, Stream stream) {
  p.rows <= 8 ? run<T, 8>(p, stream) : run<T, 16>(p, stream);
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p, Stream stream) {
  if (const int capability = device_info(stream.device).capability; capability < 90)
    throw std::invalid_argument("skinny_linear: the GPU must have compute capability 9.0 or newer, got " +
                                std::to_string(capability / 10) + "." + std::to_string(capability % 10));
  p.dtype == DType::bf16 ? run<bf16>(p, stream) : run<f16>(p, stream);
}

float skinny_linear_balance(const SkinnyLinearParams& p, int device) {
  const DeviceInfo& info = device_info(device);
  return info.capability < 90 ? 0 : plan_for(p, 8, info).balance;
}

}  // namespace pydflash::cuda
