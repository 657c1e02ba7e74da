// Convolutions inside a block.
#include "bindings.h"

namespace pydflash {
namespace {

void block_conv(Capsule x_, Capsule base_, Capsule delta_, Capsule y_, uintptr_t stream, int device) {
  const char* op = "block_conv";
  TensorView x(op, "x", x_), base(op, "base", base_), delta(op, "delta", delta_), y(op, "y", y_);
  x.floating().shape({-1, -1, -1}, "[B, S, C]").row_contiguous();
  const int64_t batch = x.dim(0), slots = x.dim(1), channels = x.dim(2);
  base.like(x).shape({-1, channels}, "[T, C]").contiguous();
  const int64_t taps = base.dim(0);
  delta.like(x).shape({batch, slots, taps, -1}, "[B, S, T, G]").row_contiguous();
  const int64_t groups = delta.dim(3);
  y.like(x).shape({batch, slots, channels}, "[B, S, C]").contiguous();
  if (taps < 1 || taps > 8) refuse(text("block_conv: taps T of base must be 1 to 8, got ", taps));
  if (groups < 1 || channels % groups != 0)
    refuse(text("block_conv: groups G of delta must divide C = ", channels, ", got ", groups));
  if (y.empty()) return;
  BlockConvParams p{};
  p.batch = int(batch), p.slots = int(slots), p.channels = int(channels), p.taps = int(taps);
  p.groups = int(groups), p.dtype = x.dtype();
  p.x = x.data(), p.base = base.data(), p.delta = delta.data(), p.y = y.data();
  x.strides_to(p.x_stride, 2), delta.strides_to(p.delta_stride, 3);
  py::gil_scoped_release nogil;
  backend::block_conv(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(block_conv)

}  // namespace pydflash
