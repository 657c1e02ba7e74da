#include "sycl/kernels/delta_parts.hpp"

#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {
namespace {

Strides2 pair_of(const int64_t* stride) { return {stride[0], stride[1]}; }
Strides3 three_of(const int64_t* stride, int64_t unit = 1) {
  return {stride[0] / unit, stride[1] / unit, stride[2] / unit};
}

template <class T>
void move_tails(const DeltaCommitParams& p, Stream stream) {
  const int64_t channels = p.x_bytes / int64_t(sizeof(T)), count = int64_t(p.layers) * p.batch * channels;
  launch<DeltaTail<T>>("delta_commit", stream, groups_for(count), kThreads, static_cast<const T*>(p.block_x),
                       static_cast<T*>(p.tail), three_of(p.block_x_stride, sizeof(T)),
                       three_of(p.tail_stride, sizeof(T)), p.index, p.batch, p.entries, p.tail_rows, channels, count);
}

}  // namespace

void short_conv(const ShortConvParams& p, Stream stream) {
  const int64_t count = int64_t(p.batch) * p.slots * p.channels;
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<ShortConv<T>>("short_conv", stream, groups_for(count), kThreads, static_cast<const T*>(p.x),
                         static_cast<const T*>(p.weight), static_cast<const T*>(p.bias),
                         static_cast<const T*>(p.tail), static_cast<T*>(p.block_x), static_cast<T*>(p.out),
                         p.visibility, pair_of(p.x_stride), pair_of(p.tail_stride), pair_of(p.block_x_stride),
                         p.visibility_stride, p.slots, p.channels, p.taps, count);
  });
}

void gated_rms_norm(const GatedRmsNormParams& p, Stream stream) {
  by_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    launch<GatedRmsNorm<T>>("gated_rms_norm", stream, int64_t(p.rows) * p.heads, 64, static_cast<const T*>(p.x),
                            static_cast<const T*>(p.gate), static_cast<const T*>(p.weight), static_cast<T*>(p.out),
                            p.gate_stride, p.heads, p.size, p.eps);
  });
}

void delta_commit(const DeltaCommitParams& p, Stream stream) {
  const int64_t groups = int64_t(p.layers) * p.batch * p.entries;
  const auto keep = [&](const float* block, float* kept, const int64_t* from, const int64_t* to, int64_t size,
                        int32_t* count) {
    launch<DeltaKeep<float>>("delta_commit", stream, groups, 64, block, kept, three_of(from), three_of(to), p.index,
                             count, p.batch, p.entries, size);
  };
  int32_t* nobody = nullptr;
  keep(p.block_k, p.kept_k, p.block_k_stride, p.kept_k_stride, p.k_size, nobody);
  keep(p.block_u, p.kept_u, p.block_u_stride, p.kept_u_stride, p.u_size, nobody);
  keep(p.block_g, p.kept_g, p.block_g_stride, p.kept_g_stride, p.g_size, p.kept_count);
  if (p.element_size == 2)
    move_tails<uint16_t>(p, stream);
  else
    move_tails<uint32_t>(p, stream);
}

}  // namespace pydflash::sycl_backend
