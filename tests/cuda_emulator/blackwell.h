// Makes quantize.cu what it is for compute capability 10 and later, for the emulator: Blackwell's
// conversion of FP32 to E2M1, cvt.rn.satfinite.e2m1x2.f32, by its definition (format.md's E2M1
// rounding, which saturates).
#pragma once

#define NVFP4_HARDWARE_E2M1 1

#include "nvfp4.h"

namespace nvfp4::cuda {

inline uint32_t encode8_hardware(const float (&t)[8]) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) word |= uint32_t{e2m1_from_float(t[i])} << (4 * i);
  return word;
}

}  // namespace nvfp4::cuda
