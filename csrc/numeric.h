// Numbers every backend must agree on: narrow floats and the counter-based random stream.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PYDFLASH_FN __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define PYDFLASH_FN inline __attribute__((always_inline))
#else
#define PYDFLASH_FN inline
#endif

namespace pydflash {

// Storage types: the bits only, arithmetic is done in float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <class To, class From>
PYDFLASH_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

PYDFLASH_FN float to_float(float x) { return x; }
PYDFLASH_FN float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
PYDFLASH_FN float to_float(f16 x) {
  // Rescaling by 2^112 turns half exponents, subnormals included, into float exponents.
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  const float scaled = bit_cast<float>(magnitude) * 5.192296858534828e33f;
  const uint32_t bits = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(bits | sign);
}

template <class T>
PYDFLASH_FN T from_float(float x);
template <>
PYDFLASH_FN float from_float<float>(float x) {
  return x;
}
template <>
PYDFLASH_FN bf16 from_float<bf16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 0x40)};
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
PYDFLASH_FN f16 from_float<f16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return f16{uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return f16{uint16_t(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Subnormal half: adding 0.5 lets the float unit round to the grid of 2^-24.
    const uint32_t rounded = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);
    return f16{uint16_t(sign | (rounded - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u);
  return f16{uint16_t(sign | (rounded >> 13))};
}

// What a random number is for; part of its key, so no two uses share one.
enum class Purpose : uint32_t { target = 0, accept = 1, residual = 2, draft = 3 };

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), first output word.
PYDFLASH_FN uint32_t philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t m0 = uint64_t(0xD2511F53u) * c0, m1 = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t n0 = uint32_t(m1 >> 32) ^ c1 ^ k0, n2 = uint32_t(m0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(m1);
    c3 = uint32_t(m0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// A uniform of 24 bits in [0, 1), strictly below 1, for (seed, position modulo 2^32, purpose, slot).
PYDFLASH_FN float uniform(int64_t seed, int64_t position, Purpose purpose, uint32_t slot = 0) {
  return float(philox(uint64_t(seed), uint32_t(position), 0, slot, uint32_t(purpose)) >> 8) * 0x1p-24f;
}

// A logit as apply_penalties leaves it; see kernels.h.
PYDFLASH_FN float penalised(float logit, bool in_prompt, int count, float repetition, float presence, float frequency,
                            float bias) {
  const float factor = in_prompt || count > 0 ? repetition : 1.0f;
  const float scaled = logit < 0 ? logit * factor : logit / factor;
  return scaled - (count > 0 ? presence : 0.0f) - frequency * float(count) + bias;
}

// Of slot i's ancestors and itself, but for the anchor, how many hold the token. sees: the slot's visibility bits.
PYDFLASH_FN int drafts_on_path(const int64_t* tokens, int slots, int64_t sees, int64_t token) {
  int count = 0;
  for (int k = 1; k < slots; ++k) count += (sees >> k & 1) != 0 && tokens[k] == token;
  return count;
}

}  // namespace pydflash
