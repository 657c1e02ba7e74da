// AOT: what a SYCL compiler leaves to say.
#include "kernels.h"

namespace pydflash::sycl_backend {

const char* description() { return "compiled ahead of time (AOT)"; }

}  // namespace pydflash::sycl_backend
