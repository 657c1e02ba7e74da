// Queues, devices and errors.
#include <array>
#include <map>
#include <mutex>

#include "sycl/launch.hpp"

namespace pydflash::sycl_backend {
namespace {

void rethrow(::sycl::exception_list errors) {
  for (const std::exception_ptr& error : errors) std::rethrow_exception(error);
}

// Where tensors of the host are worked on: the CPU device, which reads any memory of the process.
::sycl::queue make_host_queue() {
  std::string seen;
  for (const ::sycl::device& device : ::sycl::device::get_devices()) {
    if (device.is_cpu() && device.has(::sycl::aspect::usm_system_allocations))
      return ::sycl::queue(device, rethrow, {::sycl::property::queue::in_order()});
    seen += (seen.empty() ? "" : ", ") + device.get_info<::sycl::info::device::name>();
  }
  throw std::runtime_error(
      "sycl: there is no CPU device that reads memory of the host, which tensors on the CPU need (`pip install "
      "intel-opencl-rt` brings one); devices: " + (seen.empty() ? "none" : seen));
}

}  // namespace

::sycl::queue& queue_of(Stream stream) {
  if (stream.handle != nullptr) return *static_cast<::sycl::queue*>(stream.handle);
  // Never destroyed: at exit the runtime may be gone before us.
  static ::sycl::queue* own = new ::sycl::queue(make_host_queue());
  return *own;
}

const DeviceInfo& device_info(Stream stream) {
  static std::mutex mutex;
  static auto& known = *new std::map<size_t, DeviceInfo>;
  const ::sycl::device device = queue_of(stream).get_device();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [at, is_new] = known.try_emplace(std::hash<::sycl::device>{}(device));
  if (is_new) {
    namespace info = ::sycl::info::device;
    at->second.compute_units = int(device.get_info<info::max_compute_units>());
    at->second.most_threads = int(device.get_info<info::max_work_group_size>());
    at->second.local_bytes = int64_t(device.get_info<info::local_mem_size>());
    at->second.reads_host = device.has(::sycl::aspect::usm_system_allocations);
    for (const size_t size : device.get_info<info::sub_group_sizes>())
      if (size == 16) at->second.sub_groups_of_16 = true;
  }
  return at->second;
}

namespace detail {

void check_owned(const char* name, const ::sycl::context& context, const void* pointer) {
  if (pointer != nullptr && ::sycl::get_pointer_type(pointer, context) == ::sycl::usm::alloc::unknown)
    throw std::invalid_argument(std::string(name) + ": a tensor's memory does not belong to the queue's context");
}

void check_threads(const char* name, Stream stream, int threads) {
  if (const int most = device_info(stream).most_threads; threads > most)
    throw std::runtime_error(std::string(name) + ": the device has work-groups of at most " + std::to_string(most) +
                             " items, " + std::to_string(threads) + " are needed");
}

}  // namespace detail

const char* select_level(const char*) { return nullptr; }

}  // namespace pydflash::sycl_backend
