// Launching of SYCL kernels, in two builds of the same sources:
//   AOT (PYDFLASH_SYCL_AOT=1, a SYCL compiler): the functor goes to parallel_for as it is;
//   RTC (PYDFLASH_SYCL_AOT=0, any C++17 compiler): the runtime compiles the kernel from the header text that is built
//   into the module, when one of its unit is first used.
//
// A kernel is a named functor in kernels/<op>.hpp, an aggregate in namespace pydflash::sycl_backend:
//   template <class T>
//   struct Scale {
//     const T* x;                                // flat pointers, scalars, structs of scalars; no arrays
//     T* y;
//     float factor;
//     ::sycl::local_accessor<float, 1> scratch;  // local memory: the argument is Local<float>{count}
//     void operator()(::sycl::nd_item<1> item) const;
//   };
// T is float, bfloat or half; a kernel that only moves bytes takes uint16_t, uint32_t or uint64_t. It is launched by
//   launch<Scale<T>>("scale", stream, groups, threads, x, y, factor, Local<float>{count});
// with one argument per field, of the field's own type (pointers may gain const): both are checked at compile time.
// A line "// RTC <unit>: Scale<T>" above it for each T makes it known to RTC; a unit is compiled as one.
//
// Inside the namespace write ::sycl::, the namespace of SYCL itself. Nothing is waited for on a borrowed queue; on
// our own one, for memory of the host, launch returns when the kernel is done.
#pragma once

#include <sycl/sycl.hpp>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "kernels.h"
#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

struct DeviceInfo {
  int compute_units, most_threads;  // threads of a work-group
  int64_t local_bytes;              // local memory of a work-group
  bool sub_groups_of_16, reads_host;  // reads_host: any memory of the process
};

// The queue of a call: the borrowed one, or where there is none our own, which is in order and runs on the CPU.
::sycl::queue& queue_of(Stream stream);
const DeviceInfo& device_info(Stream stream);

// Local memory of `count` elements, as an argument of launch().
template <class T>
struct Local {
  int64_t count;
};

namespace detail {

template <class T>
struct Field {
  using type = T;
  static T of(T x, ::sycl::handler&) { return x; }
};
template <class T>
struct Field<Local<T>> {
  using type = ::sycl::local_accessor<T, 1>;
  static type of(Local<T> x, ::sycl::handler& handler) { return type(::sycl::range<1>(size_t(x.count)), handler); }
};

// Turns into a field of type T only, or into a pointer to the same with const.
template <class T>
struct Exactly {
  template <class U, class = std::enable_if_t<std::is_same_v<T, U> || (std::is_pointer_v<T> && std::is_pointer_v<U> &&
                                                                      std::is_convertible_v<T, U>)>>
  operator U() const;
};
struct Anything {
  template <class U>
  operator U() const;
};
template <class, class Kernel, class... Initializers>
struct Takes : std::false_type {};
template <class Kernel, class... Initializers>
struct Takes<std::void_t<decltype(Kernel{std::declval<Initializers>()...})>, Kernel, Initializers...>
    : std::true_type {};

// Throws where the context of a queue does not own the memory.
void check_owned(const char* name, const ::sycl::context& context, const void* pointer);
template <class T>
void check_argument(const char* name, const ::sycl::context& context, T argument) {
  if constexpr (std::is_pointer_v<T>) check_owned(name, context, argument);
}

void check_threads(const char* name, Stream stream, int threads);

// The compiled kernel of a mangled type name.
::sycl::kernel kernel_named(::sycl::queue& queue, const char* type_name);

}  // namespace detail

template <class Kernel, class... Arguments>
void launch(const char* name, Stream stream, int64_t groups, int threads, Arguments... arguments) {
  using namespace detail;
  static_assert(Takes<void, Kernel, Exactly<typename Field<Arguments>::type>...>::value,
                "an argument is not of its field's type");
  static_assert(!Takes<void, Kernel, Exactly<typename Field<Arguments>::type>..., Anything>::value,
                "a kernel has more fields than there are arguments");
  if (groups == 0) return;
  ::sycl::queue& queue = queue_of(stream);
  check_threads(name, stream, threads);
  if (!device_info(stream).reads_host) (check_argument(name, queue.get_context(), arguments), ...);
  const ::sycl::nd_range<1> range(size_t(groups) * size_t(threads), size_t(threads));
#if PYDFLASH_SYCL_AOT
  queue.submit([&](::sycl::handler& handler) {
    handler.parallel_for(range, Kernel{Field<Arguments>::of(arguments, handler)...});
  });
#else
  const ::sycl::kernel kernel = kernel_named(queue, typeid(Kernel).name());
  queue.submit([&](::sycl::handler& handler) {
    handler.set_args(Field<Arguments>::of(arguments, handler)...);
    handler.parallel_for(range, kernel);
  });
#endif
  if (stream.handle == nullptr) queue.wait_and_throw();
}

// Calls run(T{}) for the storage type of dtype.
template <class Run>
void by_dtype(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32: return run(float{});
    case DType::bf16: return run(bfloat{});
    case DType::f16: return run(half{});
  }
}

}  // namespace pydflash::sycl_backend
