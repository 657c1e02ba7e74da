// Linear layers of few rows.
#include <algorithm>

#include "bindings.h"

namespace pydflash {
namespace {

void skinny_linear(Capsule x_, const std::vector<py::capsule>& weights, const std::vector<MaybeCapsule>& biases,
                   bool gated, Capsule out_, uintptr_t stream, int device) {
  const char* op = "skinny_linear";
  TensorView x(op, "x", x_), out(op, "out", out_);
  x.floating().shape({-1, -1}, "[M, K]").row_contiguous();
  const int64_t rows = x.dim(0), in_features = x.dim(1);
  if (x.dtype() == DType::f32) x.fail("bfloat16 or float16", "float32");
  if (rows > 16) x.fail("at most 16 rows", text(rows));
  if (in_features < 8 || in_features % 8 != 0) x.fail("[M, K] with K a multiple of 8", text("K = ", in_features));
  const auto on_16_bytes = [](const TensorView& view) {
    return reinterpret_cast<uintptr_t>(view.data()) % 16 == 0 && (view.dim(0) < 2 || view.stride(0) % 8 == 0);
  };
  if (!on_16_bytes(x)) x.fail("rows that begin on 16 bytes", text("a stride of ", x.stride(0), " elements"));
  if (weights.empty() || weights.size() > 3 || biases.size() != weights.size())
    refuse(text("skinny_linear: weights must be 1 to 3 with a bias or None each, got ", weights.size(), " and ",
                biases.size()));
  SkinnyLinearParams p{};
  int64_t total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    TensorView weight(op, "weights", weights[i]);
    weight.like(x).shape({-1, in_features}, "[N, K]").contiguous();
    if (!on_16_bytes(weight)) weight.fail("rows that begin on 16 bytes", "others");
    if (weight.dim(0) == 0) weight.fail("at least one row", "none");
    p.weights[i] = weight.data();
    p.out_features[i] = int(weight.dim(0));
    total += weight.dim(0);
    p.biases[i] = maybe_weight(op, "biases", biases[i], x, {weight.dim(0)}, "[N]");
  }
  if (gated && (weights.size() != 2 || p.out_features[0] != p.out_features[1]))
    refuse("skinny_linear: gated takes two weights of one size");
  out.like(x).shape({rows, gated ? total / 2 : total}, "[M, N]").row_contiguous();
  if (out.empty()) return;
  p.rows = int(rows), p.in_features = int(in_features), p.num_weights = int(weights.size()), p.gated = gated;
  p.dtype = x.dtype(), p.x = x.data(), p.x_stride = rows == 1 ? in_features : x.stride(0);
  p.out = out.data(), p.out_stride = out.stride(0);
  py::gil_scoped_release nogil;
  backend::skinny_linear(p, stream_of(stream, device));
}

float skinny_linear_balance(const std::vector<int>& out_features, int in_features, int device) {
  if (out_features.empty() || out_features.size() > 3) refuse("skinny_linear_balance: out_features must be 1 to 3");
  SkinnyLinearParams p{};
  p.num_weights = int(out_features.size()), p.in_features = in_features;
  std::copy(out_features.begin(), out_features.end(), p.out_features);
  return backend::skinny_linear_balance(p, device);
}

}  // namespace

void define_skinny_linear(py::module_& m) {
  m.def("skinny_linear", &skinny_linear);
  m.def("skinny_linear_balance", &skinny_linear_balance);
}

}  // namespace pydflash
