// FP16 for the emulator.
#pragma once

#include "cuda_runtime.h"

struct __half {
  unsigned short x;
};
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline float __half2float(__half h) {
  _Float16 v;
  std::memcpy(&v, &h.x, 2);
  return static_cast<float>(v);
}
inline __half __float2half_rn(float f) {
  if (f != f) return {0x7FFF};
  const _Float16 v = static_cast<_Float16>(f);
  __half h;
  std::memcpy(&h.x, &v, 2);
  return h;
}
