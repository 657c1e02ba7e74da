// RTC: kernels are compiled by the runtime itself, a unit at a time, from the text of the headers.
#include "sycl/launch.hpp"

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "sycl/all.hpp"

namespace pydflash::sycl_backend {
namespace {

namespace syclexp = ::sycl::ext::oneapi::experimental;
using Bundle = ::sycl::kernel_bundle<::sycl::bundle_state::executable>;

const std::pair<const char*, const char*> kHeaders[] = {
#include "sycl_headers.inc"
};

// The unit of every kernel, by the kernel's mangled name.
const std::map<std::string, std::string>& units() {
  static const auto& known = *new std::map<std::string, std::string>{
#define PYDFLASH_SYCL_KERNEL(unit, ...) {typeid(__VA_ARGS__).name(), #unit},
#include "sycl/instances.inc"
#undef PYDFLASH_SYCL_KERNEL
  };
  return known;
}

// A call of parallel_for makes a type a kernel; those of other units are left empty.
std::string source_of(const std::string& unit) {
  return R"(#include "sycl/all.hpp"
namespace pydflash::sycl_backend {
constexpr bool wanted(const char* unit) {
  const char* it = ")" + unit + R"(";
  while (*unit != 0 && *unit == *it) ++unit, ++it;
  return *unit == *it;
}
template <bool kWanted, class Kernel>
void use(::sycl::handler& handler) {
  if constexpr (kWanted) handler.parallel_for(::sycl::nd_range<1>(1, 1), Kernel{});
}
#define PYDFLASH_SYCL_KERNEL(unit, ...) template void use<wanted(#unit), __VA_ARGS__>(::sycl::handler&);
#include "sycl/instances.inc"
}
)";
}

Bundle compile(const ::sycl::queue& queue, const std::string& unit) {
  syclexp::include_files headers;
  for (const auto& [name, text] : kHeaders) headers.add(name, text);
  std::string log;
  try {
    auto source = syclexp::create_kernel_bundle_from_source(
        queue.get_context(), syclexp::source_language::sycl, source_of(unit), syclexp::properties{headers});
    // An image per kernel: the runtime (2026.0) keeps views of names that are gone, and compares those of one image.
    const std::vector<std::string> options{"-I.", "-std=c++17", "-fno-fast-math", "-ffp-contract=on",
                                           "-fsycl-device-code-split=per_kernel"};
    const syclexp::properties how{syclexp::build_options{options}, syclexp::save_log{&log}};
    const std::vector<::sycl::device> devices{queue.get_device()};
    // With its cache on, the runtime gives fresh and stored code other keys: what is built here is built from stored
    // code, so that the next process finds it.
    if (const char* cache = std::getenv("SYCL_CACHE_PERSISTENT"); cache != nullptr && std::string(cache) == "1")
      syclexp::compile(source, devices, how);
    return syclexp::build(source, devices, how);
  } catch (const std::exception& error) {
    throw std::runtime_error("sycl: the kernels '" + unit + "' do not compile: " + error.what() + "\n" + log);
  }
}

}  // namespace

namespace detail {

::sycl::kernel kernel_named(::sycl::queue& queue, const char* type_name) {
  using Place = std::pair<size_t, std::string>;  // context, kernel or unit
  static std::mutex mutex;
  static auto& kernels = *new std::map<Place, ::sycl::kernel>;
  static auto& bundles = *new std::map<Place, Bundle>;
  const size_t context = std::hash<::sycl::context>{}(queue.get_context());
  const std::lock_guard<std::mutex> lock(mutex);
  const Place place{context, type_name};
  if (const auto found = kernels.find(place); found != kernels.end()) return found->second;
  const auto listed = units().find(type_name);
  if (listed == units().end()) throw std::logic_error(std::string("sycl: no RTC line of a kernel names ") + type_name);
  auto bundle = bundles.find({context, listed->second});
  if (bundle == bundles.end())
    bundle = bundles.emplace(Place{context, listed->second}, compile(queue, listed->second)).first;
  const ::sycl::kernel kernel = bundle->second.ext_oneapi_get_kernel(std::string("_ZTS") + type_name);
  kernels.emplace(place, kernel);
  return kernel;
}

}  // namespace detail

const char* description() { return "compiled at first use (RTC, which its vendor calls experimental)"; }

}  // namespace pydflash::sycl_backend
