# AOT: icpx compiles the whole module, its kernels included. RTC: the C++ compiler compiles the host's part against
# headers and libsycl of the Python environment; the kernels' text goes into the module and is compiled when used.
file(GLOB sycl_sources CONFIGURE_DEPENDS csrc/sycl/*.cpp)
execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['data'])"
                OUTPUT_VARIABLE sycl_prefix OUTPUT_STRIP_TRAILING_WHITESPACE)
find_program(PYDFLASH_ICPX NAMES icpx HINTS "$ENV{CMPLR_ROOT}/bin" DOC "Intel's SYCL compiler")

if(NOT PYDFLASH_SYCL MATCHES "^(AUTO|AOT|RTC)$")
  message(FATAL_ERROR "PYDFLASH_SYCL must be OFF, AUTO, AOT or RTC, got ${PYDFLASH_SYCL}")
endif()

if(PYDFLASH_SYCL STREQUAL "RTC")
  find_path(PYDFLASH_SYCL_INCLUDE sycl/sycl.hpp HINTS "${sycl_prefix}/include")
  find_library(PYDFLASH_SYCL_LIBRARY sycl HINTS "${sycl_prefix}/lib")
  if(NOT PYDFLASH_SYCL_INCLUDE OR NOT PYDFLASH_SYCL_LIBRARY)
    set(PYDFLASH_SYCL_REASON
        "RTC needs sycl/sycl.hpp and libsycl in ${sycl_prefix} (pip install intel-sycl-rt==2026.0.0)")
    return()
  endif()
  # The headers as C++ string literals, a header of them all, and the kernels that their "RTC" lines name.
  file(GLOB kernel_headers CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}/csrc" csrc/sycl/kernels/*.hpp)
  set(header_texts "")
  set(all_headers "#pragma once\n")
  set(instances "")
  foreach(header ${kernel_headers} numeric.h)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${header}")
    file(READ "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${header}" header_text)
    string(APPEND header_texts "{\"${header}\", R\"pydflash(${header_text})pydflash\"},\n")
    string(APPEND all_headers "#include \"${header}\"\n")
    string(REGEX MATCHALL "// RTC [a-z0-9_]+: [^\n]+" lines "${header_text}")
    foreach(line ${lines})
      string(REGEX REPLACE "// RTC ([a-z0-9_]+): (.+)" "PYDFLASH_SYCL_KERNEL(\\1, \\2)\n" line "${line}")
      string(APPEND instances "${line}")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/sycl/all.hpp" CONTENT "@all_headers@" @ONLY)
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/sycl/instances.inc" CONTENT "@instances@" @ONLY)
  foreach(made all.hpp instances.inc)
    file(READ "${CMAKE_CURRENT_BINARY_DIR}/sycl/${made}" header_text)
    string(APPEND header_texts "{\"sycl/${made}\", R\"pydflash(${header_text})pydflash\"},\n")
  endforeach()
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/sycl/sycl_headers.inc" CONTENT "@header_texts@" @ONLY)
  list(FILTER sycl_sources EXCLUDE REGEX "/aot[.]cpp$")
  pydflash_add_backend(sycl BINDINGS ${PYDFLASH_BINDINGS_NOT_ON_CUDA} SOURCES ${sycl_sources})
  target_include_directories(_sycl PRIVATE "${CMAKE_CURRENT_BINARY_DIR}" "${CMAKE_CURRENT_BINARY_DIR}/sycl")
  target_include_directories(_sycl SYSTEM PRIVATE "${PYDFLASH_SYCL_INCLUDE}")
  target_compile_definitions(_sycl PRIVATE PYDFLASH_SYCL_AOT=0 SYCL_DISABLE_FSYCL_SYCLHPP_WARNING)
  # No path of this machine is kept: the Python side has loaded libsycl before the module.
  get_filename_component(sycl_library_folder "${PYDFLASH_SYCL_LIBRARY}" DIRECTORY)
  target_link_libraries(_sycl PRIVATE "${PYDFLASH_SYCL_LIBRARY}")
  target_link_options(_sycl PRIVATE "LINKER:-rpath-link,${sycl_library_folder}")
  return()
endif()

if(NOT PYDFLASH_ICPX)
  set(PYDFLASH_SYCL_REASON
      "no icpx was found when it was built (Intel's oneAPI compiler; PYDFLASH_SYCL=RTC does without)")
  return()
endif()

set(PYDFLASH_SYCL_TARGETS "spir64_gen,spir64" CACHE STRING
    "-fsycl-targets: spir64_gen compiles for the devices below")
set(PYDFLASH_SYCL_DEVICES "bmg,pvc" CACHE STRING "GPUs that spir64_gen compiles for, as ocloc names them")
list(FILTER sycl_sources EXCLUDE REGEX "/rtc[.]cpp$")
set(aot_options -fsycl "-fsycl-targets=${PYDFLASH_SYCL_TARGETS}" -fno-sycl-unnamed-lambda)
set(aot_link "")
if(PYDFLASH_SYCL_TARGETS MATCHES "spir64_gen")
  set(aot_link -Xsycl-target-backend=spir64_gen "-device ${PYDFLASH_SYCL_DEVICES}")
endif()
# icpx would assume no NaN, no infinity and sums in any order.
set(aot_compile -std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -fp-model=precise -ffp-contract=on
    -DNDEBUG -DPYDFLASH_SYCL_AOT=1 -DPYDFLASH_BACKEND=sycl_backend -DPYDFLASH_MODULE=_sycl
    -DPYDFLASH_HOST_MEMORY=false "-I${CMAKE_CURRENT_SOURCE_DIR}/csrc")
foreach(folder ${pybind11_INCLUDE_DIR} ${Python_INCLUDE_DIRS})
  list(APPEND aot_compile -isystem "${folder}")
endforeach()
set(aot_objects "")
foreach(source ${PYDFLASH_BINDINGS} ${PYDFLASH_BINDINGS_NOT_ON_CUDA} ${sycl_sources})
  get_filename_component(name "${source}" NAME_WE)
  get_filename_component(path "${source}" ABSOLUTE)
  set(object "${CMAKE_CURRENT_BINARY_DIR}/sycl/${name}.o")
  add_custom_command(OUTPUT "${object}" DEPENDS "${path}" DEPFILE "${object}.d" VERBATIM
                     COMMAND "${PYDFLASH_ICPX}" ${aot_options} ${aot_compile} -MD -MT "${object}" -MF "${object}.d"
                             -c "${path}" -o "${object}")
  list(APPEND aot_objects "${object}")
endforeach()
set(aot_module "${CMAKE_CURRENT_BINARY_DIR}/_sycl${PYTHON_MODULE_EXTENSION}")
file(MAKE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sycl")
add_custom_command(OUTPUT "${aot_module}" DEPENDS ${aot_objects} VERBATIM
                   COMMAND "${PYDFLASH_ICPX}" ${aot_options} ${aot_link} -shared ${aot_objects} -o "${aot_module}")
add_custom_target(_sycl ALL DEPENDS "${aot_module}")
install(PROGRAMS "${aot_module}" DESTINATION pydflash)
