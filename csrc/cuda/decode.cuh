// Eight packed E2M1 codes times their block scale, in the registers that mma.sync wants.
//
// A nibble s e e m shifted into a BF16 (FP16) is e2m1 * 2^-126 (* 2^-14), subnormals included. The
// scale is brought in as s * 2^119 (* 2^7), so that the product is e2m1 * s * 2^-7: at most six
// significant bits in [2^-17, 21], exact in either type. Whoever uses it multiplies by 2^7 once at
// the end, exactly. A NaN scale makes every product NaN.
#pragma once

#include "common.cuh"

namespace nvfp4::cuda {

constexpr float kDecodedUnit = 0x1p-7f;  // decode8 returns values times this

__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t r;
  // fma with -0: BF16 has no plain multiply below sm_90.
  asm("{.reg .b32 z;\n mov.b32 z, 0x80008000;\n fma.rn.bf16x2 %0, %1, %2, z;}"
      : "=r"(r)
      : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b, __half) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// One scale, twice in a pair of T, times the power of two above.
__device__ __forceinline__ uint32_t scale_pair(float s, __nv_bfloat16) {
  const uint32_t bits = __float_as_uint(s * 0x1p119f) >> 16;  // exact: four significant bits
  return permute_bytes(bits, 0, 0x1010);
}
__device__ __forceinline__ uint32_t scale_pair(float s, __half) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(r) : "f"(s * 0x1p7f));
  return r;
}

// UE4M3 to FP32, NaN included.
__device__ __forceinline__ float scale_to_float(uint32_t code) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code & 0xFFu)));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(halves & 0xFFFFu)));
#else
  return e4m3_to_float(static_cast<uint8_t>(code));
#endif
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

// Elements 2 i and 2 i + 1 of the word's eight in out[i], the even one in the low half.
template <typename T>
__device__ __forceinline__ void decode8(uint32_t word, uint32_t scale, uint32_t (&out)[4]) {
  const uint32_t even = word & 0x0F0F0F0Fu;
  const uint32_t odd = (word >> 4) & 0x0F0F0F0Fu;
  // Selector 8 | i repeats the top bit of even's byte i, which is 0.
  const uint32_t pairs[4] = {permute_bytes(even, odd, 0x8480), permute_bytes(even, odd, 0x9591),
                             permute_bytes(even, odd, 0xA6A2), permute_bytes(even, odd, 0xB7B3)};
  for (int i = 0; i < 4; ++i) out[i] = multiply_pair(place_pair(pairs[i], T{}), scale, T{});
}

}  // namespace nvfp4::cuda
