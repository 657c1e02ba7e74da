#include <array>
#include <mutex>

#include "cuda/cuda.cuh"

namespace pydflash::cuda {

const DeviceInfo& device_info(int device) {
  static std::array<DeviceInfo, 64> known{};
  static std::array<std::once_flag, 64> once;
  std::call_once(once.at(size_t(device)), [device] {
    int multiprocessors, shared, major, minor;
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    known[size_t(device)] = {multiprocessors, shared, major * 10 + minor};
  });
  return known[size_t(device)];
}

const char* description() { return PYDFLASH_CUDA_ARCHITECTURES; }

const char* select_level(const char*) { return nullptr; }

}  // namespace pydflash::cuda
