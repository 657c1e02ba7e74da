// Shared by the CUDA kernels: launching, the device's limits, and the storage types.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.h"
#include "numeric.h"

namespace pydflash::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that does not stick must not fail the next call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct DeviceInfo {
  int multiprocessors, shared_bytes, capability;  // capability: major * 10 + minor
};

const DeviceInfo& device_info(int device);

// Makes a stream's device the current one, and puts the old one back.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) before_ = -1;
    if (before_ >= 0) check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

// Lets the next kernel of the stream start while this one runs; it stops at its own wait_for_predecessor(). Kernels that
// change what others read before that do without: caches, lengths.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until all that ran before this kernel in the stream is finished and visible. Before it only constants may be read.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches on the stream's device, overlapping the end of the kernel before it where the device can. `ranks` neighbouring
// blocks form a cluster.
template <class... Parameters, class... Arguments>
void launch_clusters(const char* name, void (*kernel)(Parameters...), int ranks, dim3 grid, dim3 block,
                     size_t shared_bytes, Stream stream, Arguments&&... arguments) {
  const DeviceScope scope(stream.device);
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)), name);
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(ranks), 1, 1};
  config.attrs = attributes;
  config.numAttrs = device_info(stream.device).capability < 90 ? 0 : ranks > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name);
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, Stream stream,
            Arguments&&... arguments) {
  launch_clusters(name, kernel, 1, grid, block, shared_bytes, stream, arguments...);
}

// Calls run(T{}) for the storage type of dtype.
template <class Run>
void by_dtype(DType dtype, Run run) {
  switch (dtype) {
    case DType::f32: return run(float{});
    case DType::bf16: return run(bf16{});
    case DType::f16: return run(f16{});
  }
}

}  // namespace pydflash::cuda
