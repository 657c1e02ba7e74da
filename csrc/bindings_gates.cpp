// Element by element, rows of any stride.
#include "bindings.h"

namespace pydflash {
namespace {

void apply_gate(Capsule x_, Capsule gate_, int activation, Capsule out_, uintptr_t stream, int device) {
  const char* op = "apply_gate";
  TensorView x(op, "x", x_), gate(op, "gate", gate_), out(op, "out", out_);
  x.floating().shape({-1, -1}, "[M, N]").row_contiguous();
  gate.like(x).shape({x.dim(0), x.dim(1)}, "[M, N]").row_contiguous();
  out.like(x).shape({x.dim(0), x.dim(1)}, "[M, N]").contiguous();
  if (out.empty()) return;
  ApplyGateParams p{};
  p.rows = int(x.dim(0)), p.size = int(x.dim(1)), p.activation = Activation(activation), p.dtype = x.dtype();
  p.x = x.data(), p.gate = gate.data(), p.out = out.data();
  p.x_stride = x.stride(0), p.gate_stride = gate.stride(0);
  py::gil_scoped_release nogil;
  backend::apply_gate(p, stream_of(stream, device));
}

void soft_cap(Capsule x_, double cap, Capsule out_, uintptr_t stream, int device) {
  const char* op = "soft_cap";
  TensorView x(op, "x", x_), out(op, "out", out_);
  x.floating().shape({-1, -1}, "[M, N]").row_contiguous();
  out.like(x).shape({x.dim(0), x.dim(1)}, "[M, N]").contiguous();
  if (!(cap > 0)) refuse(text(op, ": cap must be above 0, got ", cap));
  if (out.empty()) return;
  SoftCapParams p{};
  p.rows = int(x.dim(0)), p.size = int(x.dim(1)), p.cap = float(cap), p.dtype = x.dtype();
  p.x = x.data(), p.out = out.data(), p.x_stride = x.stride(0);
  py::gil_scoped_release nogil;
  backend::soft_cap(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(apply_gate)
PYDFLASH_BIND(soft_cap)

}  // namespace pydflash
