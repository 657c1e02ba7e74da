// One Python module per backend, compiled with PYDFLASH_BACKEND = cpu | cuda | sycl_backend. It has the kernels of the
// backend's list in kernels.h. Per op, in bindings_<topic>.cpp: check, fill the params, release the GIL, launch.
#include "bindings.h"

PYBIND11_MODULE(PYDFLASH_MODULE, m) {
  using namespace pydflash;
#define PYDFLASH_DEFINE(name, Params) define_##name(m);
  PYDFLASH_KERNELS(PYDFLASH_DEFINE)
#define PYDFLASH_NAME(name, Params) kernels.append(#name);
  py::list kernels;
  PYDFLASH_KERNELS(PYDFLASH_NAME)
  m.attr("kernels") = py::tuple(kernels);
  m.def("description", &backend::description);
  m.def("select_level", [](const std::string& name) {
    const char* chosen = backend::select_level(name.c_str());
    if (chosen == nullptr) refuse(text("select_level: no level '", name, "' in this build or on this machine"));
    return std::string(chosen);
  });
}
