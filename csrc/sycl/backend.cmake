# AOT: icpx compiles the whole module, its kernels included. RTC: the C++ compiler compiles the host's part against the
# headers and libsycl of the Python environment; the kernels' text goes into the module and is compiled when used.
file(GLOB sycl_sources CONFIGURE_DEPENDS csrc/sycl/*.cpp)
execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['data'])"
                OUTPUT_VARIABLE sycl_prefix OUTPUT_STRIP_TRAILING_WHITESPACE)
find_program(PYDFLASH_ICPX NAMES icpx HINTS "$ENV{CMPLR_ROOT}/bin" DOC "Intel's SYCL compiler")

if(PYDFLASH_SYCL STREQUAL "RTC")
  find_path(PYDFLASH_SYCL_INCLUDE sycl/sycl.hpp HINTS "${sycl_prefix}/include")
  find_library(PYDFLASH_SYCL_LIBRARY sycl HINTS "${sycl_prefix}/lib")
  if(NOT PYDFLASH_SYCL_INCLUDE OR NOT PYDFLASH_SYCL_LIBRARY)
    set(PYDFLASH_SYCL_REASON "RTC needs sycl/sycl.hpp and libsycl in ${sycl_prefix} (pip install intel-sycl-rt==2026.0.0)")
    return()
  endif()
  # The headers as C++ string literals.
  file(GLOB kernel_headers CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}/csrc" csrc/sycl/kernels/*.hpp)
  set(header_texts "")
  foreach(header ${kernel_headers} sycl/instances.inc numeric.h)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${header}")
    file(READ "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${header}" header_text)
    string(APPEND header_texts "{\"${header}\", R\"pydflash(${header_text})pydflash\"},\n")
  endforeach()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/sycl/sycl_headers.inc" CONTENT "@header_texts@" @ONLY)
  list(FILTER sycl_sources EXCLUDE REGEX "/aot[.]cpp$")
  pydflash_add_backend(sycl FUSED SOURCES ${sycl_sources})
  target_include_directories(_sycl PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/sycl")
  target_include_directories(_sycl SYSTEM PRIVATE "${PYDFLASH_SYCL_INCLUDE}")
  target_compile_definitions(_sycl PRIVATE PYDFLASH_SYCL_AOT=0 SYCL_DISABLE_FSYCL_SYCLHPP_WARNING)
  # No path of this machine is kept: the Python side has loaded libsycl before the module.
  get_filename_component(sycl_library_folder "${PYDFLASH_SYCL_LIBRARY}" DIRECTORY)
  target_link_libraries(_sycl PRIVATE "${PYDFLASH_SYCL_LIBRARY}")
  target_link_options(_sycl PRIVATE "LINKER:-rpath-link,${sycl_library_folder}")
  return()
endif()

if(NOT PYDFLASH_ICPX)
  set(PYDFLASH_SYCL_REASON "no icpx was found when it was built (Intel's oneAPI compiler; PYDFLASH_SYCL=RTC does without)")
  return()
endif()
