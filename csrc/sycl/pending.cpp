// Ops whose kernels are still to come.
#include <stdexcept>

#include "kernels.h"

#define PYDFLASH_PENDING(op, Params)                                                  \
  __attribute__((weak)) void op(const Params&, Stream) { throw std::runtime_error(#op " has no SYCL kernel yet"); } \

#define PYDFLASH_NO_SCRATCH(Params) \
  __attribute__((weak)) int64_t scratch_bytes(const Params&) { return 0; }

namespace pydflash::sycl_backend {
PYDFLASH_KERNELS(PYDFLASH_PENDING)
PYDFLASH_FUSED_KERNELS(PYDFLASH_PENDING)
PYDFLASH_NO_SCRATCH(BlockAttentionParams)
PYDFLASH_NO_SCRATCH(PathSelectParams)
PYDFLASH_NO_SCRATCH(PathTreeParams)
PYDFLASH_NO_SCRATCH(PathViterbiParams)
PYDFLASH_NO_SCRATCH(RejectSampleParams)
}  // namespace pydflash::sycl_backend
