// BF16 for the emulator.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  unsigned short x;
};
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned{v.x} << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  const unsigned bits = __float_as_uint(f);
  if (f != f) return {0x7FFF};  // the hardware's NaN, not the canonical one
  return {static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}
