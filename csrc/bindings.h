// Shared by the bindings of a backend.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "kernels.h"
#include "tensor_view.h"

// The kernels of this module.
#define PYDFLASH_PASTE(a, b) a##b
#define PYDFLASH_LIST(backend) PYDFLASH_PASTE(PYDFLASH_KERNELS_, backend)
#define PYDFLASH_KERNELS PYDFLASH_LIST(PYDFLASH_BACKEND)

namespace py = pybind11;
namespace backend = pydflash::PYDFLASH_BACKEND;

namespace pydflash {

using Capsule = py::capsule;
using MaybeCapsule = std::optional<py::capsule>;
// Gives the address of so many bytes of device memory that outlive the call.
using Allocate = py::object;

inline Stream stream_of(uintptr_t handle, int device) { return Stream{reinterpret_cast<void*>(handle), device}; }

[[noreturn]] inline void refuse(const std::string& message) { throw std::invalid_argument(message); }

template <class T>
T* data_of(const TensorView& view) {
  return static_cast<T*>(view.data());
}

template <class Params>
void* scratch_for(const Params& params, const Allocate& allocate) {
  const int64_t bytes = backend::scratch_bytes(params);
  return bytes == 0 ? nullptr : reinterpret_cast<void*>(allocate(bytes).template cast<uintptr_t>());
}

inline const void* maybe_weight(const char* op, const char* name, const MaybeCapsule& capsule, const TensorView& like,
                                std::initializer_list<int64_t> shape, const char* letters) {
  if (!capsule) return nullptr;
  return TensorView(op, name, *capsule).like(like).shape(shape, letters).contiguous().data();
}

// Values can only be looked at where the host may read them.
inline void check_values(const char* op, const char* name, const int32_t* values, int64_t batch, int64_t most) {
  if constexpr (PYDFLASH_HOST_MEMORY)
    for (int64_t b = 0; b < batch; ++b)
      if (values[b] < 0 || values[b] > most)
        refuse(text(op, ": ", name, "[", b, "] must be >= 0", most < INT32_MAX ? text(" and at most ", most) : "",
                    ", got ", values[b]));
}

inline void check_lengths(const char* op, const int32_t* lengths, int64_t batch, int64_t most = INT32_MAX) {
  check_values(op, "lengths", lengths, batch, most);
}

// cos and sin; returns the number of positions.
inline int64_t check_tables(const char* op, const TensorView& cos, const TensorView& sin, int64_t rotary_dim,
                            int64_t head_dim) {
  if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0)
    refuse(text(op, ": rotary_dim must be even and at most head_dim = ", head_dim, ", got ", rotary_dim));
  cos.float32().shape({-1, rotary_dim / 2}, "[positions, rotary_dim / 2]").contiguous();
  sin.float32().shape({cos.dim(0), rotary_dim / 2}, "[positions, rotary_dim / 2]").contiguous();
  if (rotary_dim > 0 && cos.dim(0) == 0) cos.fail("of at least one position", "0");
  return cos.dim(0);
}

// Adds kernel `name` to a module. One in the backend's list without a PYDFLASH_BIND does not link.
#define PYDFLASH_DECLARE(name, Params) void define_##name(py::module_& m);
PYDFLASH_KERNELS(PYDFLASH_DECLARE)
#undef PYDFLASH_DECLARE
#define PYDFLASH_BIND(name) \
  void define_##name(py::module_& m) { m.def(#name, &name); }

}  // namespace pydflash
