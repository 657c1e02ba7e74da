// The norm and the rotation of attention heads: a group of lanes takes one head's row of one slot.
#pragma once

#include "cuda/rows.cuh"

namespace pydflash::cuda {

constexpr int kLaneChannels = 8, kHeadThreads = 128;

template <class T>
using HeadPiece = Piece<T, kLaneChannels>;

// Where a lane finds the other channel of each of its pairs: in another lane, among its own, or anywhere. Rows that
// cannot be moved in 16-byte accesses are `anywhere` too.
enum class Pairs { lanes, own, anywhere };

// Params of both ops have head_dim, rotary_dim, interleaved, cos and sin. `aligned`: all rows are.
template <class Params>
Pairs pairs_of(const Params& p, bool aligned) {
  if (!aligned || !in_pieces(p.cos, 4, 0, nullptr, 0) || !in_pieces(p.sin, 4, 0, nullptr, 0)) return Pairs::anywhere;
  if (p.interleaved) return p.rotary_dim % kLaneChannels == 0 ? Pairs::own : Pairs::anywhere;
  return p.rotary_dim / 2 % kLaneChannels == 0 ? Pairs::lanes : Pairs::anywhere;
}

// Calls run(std::integral_constant<Pairs, ...>) for a value known at run time.
template <class Run>
void by_pairs(Pairs pairs, Run run) {
  switch (pairs) {
    case Pairs::lanes: return run(std::integral_constant<Pairs, Pairs::lanes>{});
    case Pairs::own: return run(std::integral_constant<Pairs, Pairs::own>{});
    case Pairs::anywhere: return run(std::integral_constant<Pairs, Pairs::anywhere>{});
  }
}

// The lanes of a group are the power of two that holds head_dim; those behind it idle along.
struct Group {
  int shift = 0;      // log2 of its lanes
  float per_channel;  // 1 / head_dim

  explicit Group(int head_dim) : per_channel(1.0f / float(head_dim)) {
    while ((kLaneChannels << shift) < head_dim) ++shift;
  }
  __host__ __device__ int lanes() const { return 1 << shift; }
  __host__ __device__ int per_block() const { return kHeadThreads >> shift; }
};

// A head's row from and to addresses that may be odd.
template <bool kAligned, class T>
__device__ __forceinline__ HeadPiece<T> load_head(const T* from) {
  if constexpr (kAligned) {
    return load<kLaneChannels>(from);
  } else {
    T values[kLaneChannels];
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) values[j] = from[j];
    return pack(values);
  }
}

template <bool kAligned, class T>
__device__ __forceinline__ void store_head(T* to, const HeadPiece<T>& piece) {
  if constexpr (kAligned) {
    store(to, piece);
  } else {
    T values[kLaneChannels];
    unpack(piece, values);
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) to[j] = values[j];
  }
}

// Blocks along the heads of a slot: one row a group where that fits the device at once, else more, so that cos and
// sin are read less often.
inline int blocks_for(int64_t slots, int heads, Group group, int device) {
  const int64_t most = (heads + group.per_block() - 1) / group.per_block();
  const int64_t resident = int64_t(device_info(device).multiprocessors) * (1024 / kHeadThreads);
  const int64_t wanted = (resident + slots - 1) / slots;
  return int(wanted < most ? wanted : most);
}

// Turns the pairs of a head's row by the angles of one position. Calls are for whole warps.
template <class T, Pairs kPairs>
class Rotation {
 public:
  // The position is length + depth, clamped into the tables; c is the lane's first channel, `row` shared memory of
  // the group for one row.
  template <class Params>
  __device__ __forceinline__ Rotation(const Params& p, int32_t length, int32_t depth, int c, T* row)
      : dim_(p.rotary_dim), half_(p.rotary_dim / 2), c_(c), interleaved_(p.interleaved), row_(row) {
    int32_t position;
    asm("add.sat.s32 %0, %1, %2;" : "=r"(position) : "r"(length), "r"(depth));
    position = max(min(position, int32_t(p.positions - 1)), 0);
    const float *cos = p.cos + int64_t(position) * half_, *sin = p.sin + int64_t(position) * half_;
    if (c >= dim_) return;
    if constexpr (kPairs == Pairs::lanes) {
      const int from = c < half_ ? c : c - half_;
      unpack(load<kAngles>(cos + from), cos_), unpack(load<kAngles>(sin + from), sin_);
#pragma unroll
      for (int j = 0; j < kAngles; ++j) sin_[j] = c < half_ ? -sin_[j] : sin_[j];
    } else if constexpr (kPairs == Pairs::own) {
      unpack(load<kAngles>(cos + c / 2), cos_), unpack(load<kAngles>(sin + c / 2), sin_);
    } else {
#pragma unroll
      for (int j = 0; j < kAngles; ++j) {
        if (c + j >= dim_) continue;
        const int from = interleaved_ ? (c + j) / 2 : (c + j) % half_;
        cos_[j] = cos[from], sin_[j] = first(c + j) ? -sin[from] : sin[from];
      }
    }
  }

  __device__ __forceinline__ HeadPiece<T> operator()(const HeadPiece<T>& x) const {
    float a[kLaneChannels], b[kLaneChannels], y[kLaneChannels];
    widen(x, a);
    if constexpr (kPairs != Pairs::own) widen(others(x), b);
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      if constexpr (kPairs == Pairs::own)
        y[j] = j % 2 == 0 ? a[j] * cos_[j / 2] - a[j + 1] * sin_[j / 2] : a[j] * cos_[j / 2] + a[j - 1] * sin_[j / 2];
      else
        y[j] = kPairs == Pairs::lanes || c_ + j < dim_ ? a[j] * cos_[j] + b[j] * sin_[j] : a[j];
    }
    return c_ < dim_ ? narrow<T>(y) : x;
  }

 private:
  static constexpr int kAngles = kPairs == Pairs::own ? kLaneChannels / 2 : kLaneChannels;

  __device__ __forceinline__ bool first(int c) const { return interleaved_ ? c % 2 == 0 : c < half_; }

  // The other channel of the pair, for each channel of the lane.
  __device__ __forceinline__ HeadPiece<T> others(HeadPiece<T> x) const {
    if constexpr (kPairs == Pairs::lanes) {
      const int apart = c_ < half_ ? half_ / kLaneChannels : -half_ / kLaneChannels;
#pragma unroll
      for (auto& word : x.words) word = __shfl_sync(0xffffffffu, word, int(threadIdx.x % 32) + apart);
      return x;
    } else {
      store(row_ + c_, x);
      __syncwarp();
      T values[kLaneChannels] = {};
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j)
        if (const int c = c_ + j; c < dim_) values[j] = row_[interleaved_ ? c ^ 1 : first(c) ? c + half_ : c - half_];
      __syncwarp();
      return pack(values);
    }
  }

  int dim_, half_, c_;
  bool interleaved_;
  T* row_;
  float cos_[kAngles], sin_[kAngles];  // sines with the sign of the channel, but for `own`
};

// The RMSNorm of a head's row; for whole warps. Params has eps, weight_offset and round_first.
template <class T, class Params>
__device__ __forceinline__ HeadPiece<T> head_norm(const Params& p, Group group, const HeadPiece<T>& x,
                                                  const HeadPiece<T>& weight) {
  float wide[kLaneChannels];
  widen(x, wide);
  const float mean = lane_sum(square_sum(wide), group.lanes()) * group.per_channel;
  return scaled(x, rsqrtf(mean + p.eps), weight, p.weight_offset, p.round_first);
}

}  // namespace pydflash::cuda
