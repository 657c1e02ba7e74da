// For test_sycl.py: queues as a caller has them, and what the host side does where things go wrong. Compiled with
// csrc/sycl/device.cpp, so that its own queue is there, too.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "sycl/launch.hpp"

using namespace pydflash::sycl_backend;

namespace {

std::atomic<bool> held{false};

// Runs `body` and leaves the message of what it throws; returns whether it threw.
template <class Body>
int message_of(char* message, size_t size, Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), size - 1);
    return 1;
  }
}

}  // namespace

extern "C" {

void* make_queue() {
  for (const ::sycl::device& device : ::sycl::device::get_devices())
    if (device.is_cpu()) return new ::sycl::queue(device, ::sycl::property::queue::in_order());
  return nullptr;
}

// What comes later in the queue waits until release().
void hold(void* queue) {
  held = true;
  static_cast<::sycl::queue*>(queue)->submit([](::sycl::handler& handler) {
    handler.host_task([] {
      while (held) std::this_thread::yield();
    });
  });
}

int is_held() { return held; }
void release() { held = false; }
void wait(void* queue) { static_cast<::sycl::queue*>(queue)->wait(); }

int asynchronous_error(char* message, size_t size) {
  return message_of(message, size, [] {
    ::sycl::queue& queue = queue_of({});
    queue.submit([](::sycl::handler& handler) { handler.host_task([] { throw std::runtime_error("went wrong"); }); });
    queue.wait_and_throw();
  });
}

// kind: memory of the queue's own context, of another one, or of none.
int check_memory(void* handle, const char* kind, char* message, size_t size) {
  const ::sycl::queue& queue = *static_cast<::sycl::queue*>(handle);
  const ::sycl::context other(queue.get_device());
  const bool own = std::strcmp(kind, "own") == 0, none = std::strcmp(kind, "none") == 0;
  const ::sycl::context& context = own ? queue.get_context() : other;
  void* memory = none ? std::malloc(64) : ::sycl::malloc_device(64, queue.get_device(), context);
  const int failed = message_of(message, size, [&] { detail::check_owned("an op", queue.get_context(), memory); });
  none ? std::free(memory) : ::sycl::free(memory, context);
  return failed;
}

}  // extern "C"
