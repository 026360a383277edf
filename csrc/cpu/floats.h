// Reading and writing the three float types as FP32. Rounding is to nearest even; a NaN is written
// in its canonical form (nvfp4.h), so that bytes agree between devices.
#pragma once

#include <cstdint>

#include "../kernels.h"
#include "../nvfp4.h"

namespace nvfp4::cpu {

struct Float32 {
  using Storage = uint32_t;
  static NVFP4_HD float load(Storage bits) { return float_from_bits(bits); }
  static NVFP4_HD Storage store(float v) { return v != v ? kNanFloat32 : bits_from_float(v); }
};

struct BFloat16 {
  using Storage = uint16_t;
  static NVFP4_HD float load(Storage bits) { return float_from_bits(uint32_t{bits} << 16); }
  static NVFP4_HD Storage store(float v) {
    const uint32_t bits = bits_from_float(v);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return v != v ? kNanBFloat16 : static_cast<Storage>(rounded >> 16);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static NVFP4_HD float load(Storage bits) {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    // Subnormals are integers times 2^-24; Inf and NaN keep an all-ones exponent.
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u);
    return float_from_bits((magnitude < 0x400u ? bits_from_float(subnormal) : normal) | sign);
  }
  static NVFP4_HD Storage store(float v) {
    const uint32_t bits = bits_from_float(v);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return kNanFloat16;
    if (magnitude >= 0x477FF000u) return static_cast<Storage>(sign | 0x7C00u);  // >= 65520
    if (magnitude < 0x38800000u) {
      // Subnormal: adding 0.5 makes FP32's own rounding fall on the FP16 grid (ulp 2^-24).
      const float shifted = float_from_bits(magnitude) + 0.5f;
      return static_cast<Storage>(sign | (bits_from_float(shifted) - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return static_cast<Storage>(sign | ((rounded - 0x38000000u) >> 13));
  }
};

// Calls f(FloatType{}) for the type that `type` names.
template <typename F>
void dispatch_float(DType type, const F& f) {
  switch (type) {
    case DType::kFloat32:
      return f(Float32{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
  }
}

}  // namespace nvfp4::cpu
