// Shared by the bindings of a backend.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "kernels.h"
#include "tensor_view.h"

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

// Adds the ops of PYDFLASH_FUSED_KERNELS to a module, skinny_linear, and packed_linear.
void define_fused(py::module_& m);
void define_linear(py::module_& m);
void define_packed(py::module_& m);

}  // namespace pydflash
