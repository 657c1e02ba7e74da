// Tensor maps, made on the host.
#pragma once

#include <cuda.h>

#include "cuda/cuda.cuh"

namespace pydflash::cuda {

// A tensor of kDims dimensions, the innermost first, as boxes whose rows are 128 bytes, swizzled. strides: in elements,
// of all dimensions but the innermost. False where the driver does not take it.
template <int kDims>
bool make_tensor_map(CUtensorMap* map, DType dtype, const void* data, const int64_t (&sizes)[kDims],
                     const int64_t (&strides)[kDims - 1], const int (&box)[kDims]) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  const CUtensorMapDataType types[3] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                        CU_TENSOR_MAP_DATA_TYPE_FLOAT16};
  cuuint64_t dims[kDims], bytes[kDims - 1];
  cuuint32_t boxes[kDims], steps[kDims];
  for (int i = 0; i < kDims; ++i) dims[i] = cuuint64_t(sizes[i]), boxes[i] = cuuint32_t(box[i]), steps[i] = 1;
  for (int i = 0; i + 1 < kDims; ++i) bytes[i] = cuuint64_t(strides[i] * (dtype == DType::f32 ? 4 : 2));
  return encode != nullptr &&
         encode(map, types[int(dtype)], kDims, const_cast<void*>(data), dims, bytes, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace pydflash::cuda
