// Chooses, once, the widest instruction-set level that both the build and the machine have.
#include <atomic>
#include <cstring>

#include "kernels.h"

#if defined(PYDFLASH_X86)
#include <cpuid.h>
#endif
#if defined(PYDFLASH_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pydflash::cpu {

#define PYDFLASH_DECLARE(name, Params) void name(const Params& params, Stream stream);
#define PYDFLASH_MEMBER(name, Params) void (*name)(const Params&, Stream);

namespace base {
PYDFLASH_KERNELS_cpu(PYDFLASH_DECLARE)
}
#if defined(PYDFLASH_X86)
namespace avx2 {
PYDFLASH_KERNELS_cpu(PYDFLASH_DECLARE)
}
namespace avx512 {
PYDFLASH_KERNELS_cpu(PYDFLASH_DECLARE)
}
namespace avx512_bf16 {
void block_attention(const BlockAttentionParams& params, Stream stream);
}
namespace amx {
void block_attention(const BlockAttentionParams& params, Stream stream);
void packed_linear(const PackedLinearParams& params, Stream stream);
}
#endif

namespace {

struct Level {
  const char* name;
  bool (*usable)();
  bool (*preferred)();  // whether it may be chosen unasked
  PYDFLASH_KERNELS_cpu(PYDFLASH_MEMBER)
};

#define PYDFLASH_BASE(name, Params) base::name,
#define PYDFLASH_AVX2(name, Params) avx2::name,
#define PYDFLASH_AVX512(name, Params) avx512::name,

bool yes() { return true; }

#if defined(PYDFLASH_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Asked of the processor itself: older compilers have no names for these features.
bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx512() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}

// On an Intel Xeon VDPBF16PS loses to widening to float (64 rows x 272 keys x 128, 8 heads: 740 against 560 us). AMD's
// is documented at twice the work of its FMA; that was not measured.
bool is_amd() { return __builtin_cpu_is("amd"); }

// Linux gives a process the tile registers when it asks for them (feature 18 of the XSAVE state).
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool tiles = edx >> 24 & 1, bf16 = edx >> 22 & 1, int8 = edx >> 25 & 1;
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return tiles && bf16 && int8 && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// avx512 with other kernels for what the level adds.
Level wider(const char* name, bool (*usable)(), bool (*preferred)(), decltype(Level::block_attention) attention,
            decltype(Level::packed_linear) linear = avx512::packed_linear) {
  Level level{name, usable, preferred, PYDFLASH_KERNELS_cpu(PYDFLASH_AVX512)};
  level.block_attention = attention, level.packed_linear = linear;
  return level;
}
#endif

const Level levels[] = {  // widest first
#if defined(PYDFLASH_X86)
    wider("amx", has_amx, yes, amx::block_attention, amx::packed_linear),
    wider("avx512_bf16", has_avx512_bf16, is_amd, avx512_bf16::block_attention),
    {"avx512", has_avx512, yes, PYDFLASH_KERNELS_cpu(PYDFLASH_AVX512)},
    {"avx2", has_avx2, yes, PYDFLASH_KERNELS_cpu(PYDFLASH_AVX2)},
#endif
    {"base", yes, yes, PYDFLASH_KERNELS_cpu(PYDFLASH_BASE)}};

const Level* widest() {
  for (const Level& level : levels)
    if (level.preferred() && level.usable()) return &level;
  return nullptr;
}

std::atomic<const Level*> chosen{widest()};

}  // namespace

const char* description() { return chosen.load()->name; }

const char* select_level(const char* name) {
  for (const Level& level : levels)
    if (std::strcmp(level.name, name) == 0 && level.usable()) {
      chosen = &level;
      return level.name;
    }
  return nullptr;
}

#define PYDFLASH_LAUNCH(name, Params) \
  void name(const Params& params, Stream stream) { chosen.load()->name(params, stream); }
PYDFLASH_KERNELS_cpu(PYDFLASH_LAUNCH)

}  // namespace pydflash::cpu
