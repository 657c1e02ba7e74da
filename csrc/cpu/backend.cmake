# Every kernel file is compiled once per instruction-set level, each in its own namespace; dispatch.cpp picks
# the widest level of the running machine. So one wheel serves all machines, without -march=native.
set(cpu_once csrc/cpu/crew.cpp csrc/cpu/decoder.cpp csrc/cpu/dispatch.cpp)  # all other files are kernels
file(GLOB cpu_kernels CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" csrc/cpu/*.cpp)
list(REMOVE_ITEM cpu_kernels ${cpu_once})
set(cpu_levels base)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND cpu_levels avx2 avx512 avx512_bf16 amx)
endif()
set(cpu_flags_base "")
set(cpu_flags_avx2 -mavx2 -mfma -mf16c)
set(cpu_flags_avx512 ${cpu_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
# These two are avx512 with some kernels of their own.
set(cpu_flags_avx512_bf16 ${cpu_flags_avx512} -mavx512bf16)
set(cpu_flags_amx ${cpu_flags_avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)
set(cpu_kernels_avx512_bf16 csrc/cpu/block_attention.cpp)
set(cpu_kernels_amx csrc/cpu/block_attention.cpp csrc/cpu/packed_linear.cpp)

set(cpu_objects "")
foreach(level ${cpu_levels})
  if(NOT DEFINED cpu_kernels_${level})
    set(cpu_kernels_${level} ${cpu_kernels})
  endif()
  add_library(cpu_${level} OBJECT ${cpu_kernels_${level}})
  target_include_directories(cpu_${level} PRIVATE csrc)
  target_compile_definitions(cpu_${level} PRIVATE PYDFLASH_LEVEL=${level} PYDFLASH_LEVEL_${level}=1)
  # No exceptions of IEEE rules but these two: results stay the same for NaN and infinity.
  target_compile_options(cpu_${level} PRIVATE ${cpu_flags_${level}} -O3 -fno-math-errno -fno-trapping-math
                                              -Wall -Wextra -Wno-psabi)
  target_link_libraries(cpu_${level} PRIVATE OpenMP::OpenMP_CXX)
  if(PYDFLASH_SANITIZE)
    target_compile_options(cpu_${level} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=undefined
                                                -fno-omit-frame-pointer -g -O1)
  endif()
  list(APPEND cpu_objects $<TARGET_OBJECTS:cpu_${level}>)
endforeach()

pydflash_add_backend(cpu BINDINGS csrc/bindings_packed.cpp ${PYDFLASH_BINDINGS_NOT_ON_CUDA}
                     SOURCES ${cpu_once} ${cpu_objects})
target_link_libraries(_cpu PRIVATE OpenMP::OpenMP_CXX)
if("avx512" IN_LIST cpu_levels)
  target_compile_definitions(_cpu PRIVATE PYDFLASH_X86=1)
endif()
