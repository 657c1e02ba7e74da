// Weights as 64-bit integers, and the exponentials and logarithms of a lattice in them: devices without doubles sum
// them exactly, in any order, and no compiler flag changes the result.
#pragma once

#include "sycl/kernels/types.hpp"

namespace pydflash::sycl_backend {

// The high word of a product.
inline uint64_t high_product(uint64_t a, uint64_t b) { return ::sycl::mul_hi(a, b); }

inline float power_of_two(int exponent) { return bit_cast<float>(uint32_t(127 + exponent) << 23); }

// A weight of 1 is 2^unit_bits(count): `count` weights of at most 1 add up to no more than 2^62.
inline int unit_bits(int count) {
  int bits = 62;
  for (int64_t room = 1; room < count; room *= 2) --bits;
  return bits;
}

inline uint64_t fixed(float weight, int bits) { return uint64_t(weight * power_of_two(bits) + 0.5f); }
inline float from_fixed(uint64_t weight, int bits) { return float(weight) * power_of_two(-bits); }

// A uniform as the integer that it is a 2^-24th of.
inline uint32_t bits_of(float u) { return uint32_t(u * 16777216.0f); }

// The integer part of u * total.
inline uint64_t share_of(uint32_t u, uint64_t total) {
  return high_product(u, total) << 40 | (u * total) >> 24;
}

// The least integer, from 1 on, that is at least share * total; share < 1.
inline uint64_t portion_of(float share, uint64_t total) {
  const uint32_t bits = bit_cast<uint32_t>(share), exponent = bits >> 23;
  if (!(share > 0) || exponent == 0) return 1;
  const uint64_t factor = (bits & 0x7fffffu) | 0x800000u, high = high_product(factor, total), low = factor * total;
  const uint32_t shift = 150 - exponent;  // at least 24: share is factor / 2^shift
  if (shift >= 88) return 1;
  const uint64_t whole = shift < 64 ? high << (64 - shift) | low >> shift : high >> (shift - 64);
  const uint64_t back_low = shift < 64 ? whole << shift : 0;
  const uint64_t back_high = shift < 64 ? whole >> (64 - shift) : whole << (shift - 64);
  const uint64_t least = whole + (back_low != low || back_high != high ? 1 : 0);
  return least > 0 ? least : 1;
}

// 2^63 / k!
constexpr uint64_t kExpTerms[] = {
    0x8000000000000000ull, 0x8000000000000000ull, 0x4000000000000000ull, 0x1555555555555555ull,
    0x555555555555555ull, 0x111111111111111ull, 0x2D82D82D82D82Eull, 0x6806806806807ull,
    0xD00D00D00D01ull, 0x171DE3A556C7ull, 0x24FC9F6EF14ull, 0x35CC8ACFEBull,
    0x47BB63BFEull, 0x5849184Full, 0x64E5D2Aull, 0x6B9FD0ull,
    0x6B9FDull, 0x654Bull};

// e^-x in units of 2^-63, for x >= 0: off by no more than 2^-54 of itself and one unit.
inline uint64_t exp_minus(float x) {
  if (!(x < 44.0f)) return 0;
  const uint64_t argument = uint64_t(x * 0x1p57f);                         // units of 2^-57
  const uint64_t binary = high_product(argument, 0xB8AA3B295C17F0BCull);   // x log2 e, in units of 2^-56
  const uint64_t rest = high_product(binary << 8, 0xB17217F7D1CF79ABull);  // its fraction times ln 2, of 2^-64
  uint64_t value = kExpTerms[17];
  for (int k = 16; k >= 0; --k) value = kExpTerms[k] - high_product(rest, value);
  return value >> (binary >> 56);
}

// Terms of a lattice's row are multiples of 2^-52, as doubles are beside a sum between 1 and 2.
constexpr int kExpBits = 52;

inline uint64_t exp_term(float distance) {
  constexpr int kSpare = 63 - kExpBits;
  return (exp_minus(-distance) + (1u << (kSpare - 1))) >> kSpare;
}

// The logarithm of a sum of terms, at least 1, rounded once: a float's logarithm, and one step of Newton's method in
// integers. Before rounding it is off by no more than 2^-46 of itself, 2^-51, and 2^-53 for each term: the same float
// as with doubles, but where the terms beside the largest come to less than 2^-26 and doubles depend on their order.
inline float log_of_terms(uint64_t total) {
  const uint64_t one = uint64_t(1) << kExpBits;
  const float guess = ::sycl::log1p(from_fixed(total - one, kExpBits));
  const int lead = int(::sycl::clz(total));
  // total * e^-guess, which is 1 up to the guess's error.
  const uint64_t product = high_product(total << lead, exp_minus(guess));
  const int bits = kExpBits - 1 + lead;
  const uint64_t unit = uint64_t(1) << bits;
  const float error = product >= unit ? from_fixed(product - unit, bits) : -from_fixed(unit - product, bits);
  return guess + (error - 0.5f * error * error);
}

}  // namespace pydflash::sycl_backend
