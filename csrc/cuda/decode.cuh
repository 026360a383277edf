// Eight packed E2M1 codes times their block scale, in the registers that mma.sync wants.
//
// A nibble s e e m shifted into a BF16 (FP16) is e2m1 * 2^-126 (* 2^-14), subnormals included. The
// scale is brought in as s * 2^119 (* 2^7), so that the product is e2m1 * s * 2^-7: at most six
// significant bits in [2^-17, 21], exact in either type. Whoever uses it multiplies by 2^7 once at
// the end, exactly. A NaN scale makes every product NaN.
#pragma once

#include "block_math.h"
#include "common.cuh"

namespace nvfp4::cuda {

constexpr float kDecodedUnit = 0x1p-7f;  // decode8 returns values times this

// One scale, twice in a pair of T, times the power of two above.
__device__ __forceinline__ uint32_t scale_pair(float s, __nv_bfloat16) {
  const uint32_t bits = __float_as_uint(s * 0x1p119f) >> 16;  // exact: four significant bits
  return permute_bytes(bits, 0, 0x1010);
}
__device__ __forceinline__ uint32_t scale_pair(float s, __half) {
  return round_pair<__half>(s * 0x1p7f, s * 0x1p7f);
}

// A pair of nibbles in bits 3..0 and 19..16 of an otherwise clear word.
__device__ __forceinline__ uint32_t place_pair(uint32_t nibbles, __nv_bfloat16) {
  // s into bit 15, eem into bits 8..6: the two copies don't overlap, so the multiply doesn't carry.
  return (nibbles * ((1u << 12) + (1u << 6))) & 0x81C081C0u;
}
__device__ __forceinline__ uint32_t place_pair(uint32_t nibbles, __half) {
  const uint32_t magnitude = nibbles * (1u << 9);  // eem in bits 11..9
  return (magnitude & 0x0E000E00u) | ((nibbles * (1u << 12)) & 0x80008000u);
}

// Nibbles 2 i and 2 i + 1 of the word's eight into the places place_pair wants, in pairs[i].
__device__ __forceinline__ void spread_pairs(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t even = word & 0x0F0F0F0Fu;
  const uint32_t odd = (word >> 4) & 0x0F0F0F0Fu;
  // Selector 8 | i repeats the top bit of even's byte i, which is 0.
  pairs[0] = permute_bytes(even, odd, 0x8480);
  pairs[1] = permute_bytes(even, odd, 0x9591);
  pairs[2] = permute_bytes(even, odd, 0xA6A2);
  pairs[3] = permute_bytes(even, odd, 0xB7B3);
}

// Elements 2 i and 2 i + 1 of the word's eight in out[i], the even one in the low half.
template <typename T>
__device__ __forceinline__ void decode8(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
  spread_pairs(word, out);
  for (int i = 0; i < 4; ++i) out[i] = multiply_pair(place_pair(out[i], T{}), scale, T{});
}

// ------------------------------------------------------------- pairs as they lie: elements i, i +
// 4
//
// Without the bytes' shuffle, for whoever may choose the order of k: two instructions fewer a pair.

// decode8_split returns values times this.
template <typename T>
constexpr float kSplitUnit = kDecodedUnit;
template <>
inline constexpr float kSplitUnit<__half> = 0x1p-14f;

// Two scales in bits 0..15, each twice in a pair of T, times what decode8_split wants of T.
__device__ __forceinline__ void scale_pairs(uint32_t two, uint32_t (&pairs)[2], __nv_bfloat16) {
  float low, high;
  widen_pair(e4m3_to_half_pair(two), low, high, __half{});
  const uint32_t both = multiply_pair(round_pair<__nv_bfloat16>(low, high), 0x7B007B00u,  // 2^119
                                      __nv_bfloat16{});
  pairs[0] = both_low(both);
  pairs[1] = both_high(both);
}
// FP16 has e2m1 * 2^-14 times s without another factor: multiples of 2^-24, at most 0.17.
__device__ __forceinline__ void scale_pairs(uint32_t two, uint32_t (&pairs)[2], __half) {
  const uint32_t both = e4m3_to_half_pair(two);
  pairs[0] = both_low(both);
  pairs[1] = both_high(both);
}

// Nibbles i and i + 4 where T has sign and magnitude, in pairs[i]. Two pairs share a word: where T
// wants them, and some bits further down. Shifts to the left are multiplications, on another pipe
// than the rest.
__device__ __forceinline__ void place_split(uint32_t word, uint32_t (&pairs)[4], __nv_bfloat16) {
  // Halves s x x x s x x e e m x e e m x x.
  constexpr uint32_t kSign = 0x88008800u, kWanted = 0x81C081C0u;
  const uint32_t low = select_bits(word << 8, word << 2, kSign);
  const uint32_t high = select_bits(word, word >> 6, kSign);
  pairs[0] = (low << 4) & kWanted;
  pairs[1] = low & kWanted;
  pairs[2] = (high << 4) & kWanted;
  pairs[3] = high & kWanted;
}
__device__ __forceinline__ void place_split(uint32_t word, uint32_t (&pairs)[4], __half) {
  // Bytes s x x x e e m x.
  constexpr uint32_t kSign = 0x80808080u, kWanted = 0x8E008E00u;
  const uint32_t even = select_bits(word << 4, word << 1, kSign);
  const uint32_t odd = select_bits(word, word >> 3, kSign);
  pairs[0] = (even << 8) & kWanted;
  pairs[1] = (odd << 8) & kWanted;
  pairs[2] = even & kWanted;
  pairs[3] = odd & kWanted;
}

// Elements i and i + 4 of the word's eight in out[i], the former in the low half. scale: a pair of
// scale_pairs. Exact in either type, subnormals included; a NaN scale makes every product NaN.
template <typename T>
__device__ __forceinline__ void decode8_split(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
  place_split(word, out, T{});
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = multiply_pair(out[i], scale, T{});
}

}  // namespace nvfp4::cuda
