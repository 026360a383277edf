// The NVFP4 format: the one C++ statement of its arithmetic, for host and device.
//
//   x ~ e2m1 * block_scale * global_scale           one block = 16 consecutive elements along K
//   s = e4m3_rn_satfinite((amax / 6) / g)           amax over the block's finite elements
//   t_i = x_i / (float(s) * g)                      correctly rounded FP32 division
//   code_i = e2m1_rn(t_i)                           nearest even, saturating at +-6
//
// Two codes share a byte, the even K index in the low nibble. Everything is FP32 with IEEE
// rounding and gradual underflow; the only fused multiply-adds are the ones written as fma().
// Compiled with -ffp-contract=off / --fmad=false, so every device gives the same bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define NVFP4_HD __host__ __device__ __forceinline__
#else
#define NVFP4_HD inline __attribute__((always_inline))
#endif

namespace nvfp4 {

constexpr int kBlockSize = 16;  // elements that share one block scale
constexpr int kBlockBytes = kBlockSize / 2;
constexpr float kE2m1Max = 6.0f;
constexpr float kE4m3Max = 448.0f;
constexpr uint8_t kE4m3MaxCode = 0x7E;
constexpr uint8_t kE4m3Nan = 0x7F;
constexpr uint8_t kE2m1SignBit = 0x8;
constexpr float kGlobalScaleDivisor = kE2m1Max * kE4m3Max;  // 2688
constexpr float kGlobalScaleMin = 0x1p-126f;                // never zero, never subnormal

// Canonical quiet NaNs: a NaN result has these bytes on every device.
constexpr uint32_t kNanFloat32 = 0x7FC00000u;
constexpr uint16_t kNanBFloat16 = 0x7FC0u;
constexpr uint16_t kNanFloat16 = 0x7E00u;

// Exact accumulation: a product of two decoded values is a multiple of 2^-20 below 2^23.
constexpr int kProductFractionBits = 20;
constexpr int64_t kExactKMax = int64_t{1} << 19;

NVFP4_HD float float_from_bits(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

NVFP4_HD uint32_t bits_from_float(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

NVFP4_HD float abs_bits(float value) {
  return float_from_bits(bits_from_float(value) & 0x7FFFFFFFu);
}

NVFP4_HD bool is_finite(float value) {
  return (bits_from_float(value) & 0x7F800000u) != 0x7F800000u;
}

// The host knows g: it must be usable. On the device an unusable g makes every scale byte NaN.
NVFP4_HD bool is_usable_global_scale(float g) { return is_finite(g) && g > 0.0f; }

// -------------------------------------------------------------------------------- UE4M3 scale

// Round to nearest even, saturating at 448; NaN stays NaN. v >= 0.
NVFP4_HD uint8_t e4m3_from_float(float v) {
  const uint32_t bits = bits_from_float(v);
  if (bits > 0x7F800000u) return kE4m3Nan;
  if (v >= kE4m3Max) return kE4m3MaxCode;
  if (v < 0x1p-6f) {
    // Subnormal: units of 2^-9. Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
    return static_cast<uint8_t>(bits_from_float(v * 0x1p9f + 12582912.0f));
  }
  const uint32_t rounded = bits + 0x7FFFFu + ((bits >> 20) & 1u);
  return static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

NVFP4_HD float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7Fu;
  if (magnitude == kE4m3Nan) return float_from_bits(kNanFloat32);
  if (magnitude < 8u) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return float_from_bits(bits_from_float(value) | sign);
  }
  return float_from_bits(((magnitude + (120u << 3)) << 20) | sign);
}

// --------------------------------------------------------------------------------- E2M1 codes

// Round to nearest even on {0, .5, 1, 1.5, 2, 3, 4, 6}, saturating; the sign of zero is kept.
NVFP4_HD uint8_t e2m1_from_float(float t) {
  const float a = abs_bits(t);
  // A tie goes to the even code: it is passed (>=) exactly where the upper code is the even one.
  const int magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                        (a >= 3.5f) + (a > 5.0f);
  return static_cast<uint8_t>(magnitude | ((bits_from_float(t) >> 28) & kE2m1SignBit));
}

NVFP4_HD float e2m1_to_float(uint8_t code) {
  const uint32_t magnitude = code & 7u;
  // Codes 2..7 are normal (exponent bias 1, one mantissa bit); 0 and 1 are 0 and 0.5.
  const uint32_t normal = (magnitude + (126u << 1)) << 22;
  const uint32_t bits = magnitude >= 2u ? normal : magnitude * 0x3F000000u;
  return float_from_bits(bits | (static_cast<uint32_t>(code & kE2m1SignBit) << 28));
}

// ------------------------------------------------------------------------------- block scale

struct BlockScale {
  uint8_t code;   // what is stored; 0x7F where the block held a non-finite element
  float divisor;  // float(s) * g, what the elements are divided by; 0 where s is 0
};

// amax: over the block's finite elements. all_finite: whether those were all of them.
NVFP4_HD BlockScale make_block_scale(float amax, bool all_finite, float g) {
  const uint8_t s = e4m3_from_float((amax / kE2m1Max) / g);
  const bool usable = all_finite && is_usable_global_scale(g);
  return {usable ? s : kE4m3Nan, e4m3_to_float(s) * g};
}

// One element's code. A non-finite element counts as 0; where s is 0 every code is a signed zero.
NVFP4_HD uint8_t quantize_element(float x, float divisor) {
  if (!is_finite(x)) return 0;
  if (divisor == 0.0f) return static_cast<uint8_t>((bits_from_float(x) >> 28) & kE2m1SignBit);
  return e2m1_from_float(x / divisor);  // divide, not rcp: ties must match the reference
}

// Dynamic g of a tensor whose largest finite magnitude is amax.
NVFP4_HD float global_scale_from_amax(float amax) {
  if (amax == 0.0f) return 1.0f;
  const float g = amax / kGlobalScaleDivisor;
  return g < kGlobalScaleMin ? kGlobalScaleMin : g;
}

// -------------------------------------------------------------------------------------- SwiGLU

NVFP4_HD float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// silu(v) = quotient * k. Kept apart so that a GPU may divide its own way: the same correctly
// rounded quotient gives the same bytes.
struct SiluParts {
  float numerator, denominator;
  float k;  // a power of two: 1, or 2^-64 where v < 0
};

// silu(v) = v / (1 + exp(-v)), within 2 ulp of the exact value. exp(-t) = 2^n (1 + u) by range
// reduction and a polynomial. For v < 0 both terms of the denominator carry k = 2^-64: the quotient
// stays normal, and the one multiply by k at the end is exact or does the only subnormal rounding.
// NaN, infinities and signed zeros need no branch: the clamps let a NaN through.
NVFP4_HD SiluParts silu_parts(float v) {
  const float w = v < -112.0f ? -112.0f : v;               // silu is -0 below -108.6
  const float t = w > 40.0f ? 40.0f : w;                   // 1 + exp(-t) is 1 above
  const float j = fma_rn(t, -0x1.715476p+0f, 0x1.8p+23f);  // low bits: n = rint(-t * log2(e))
  const float n = j - 0x1.8p+23f;
  float r = fma_rn(n, -0x1.62e4p-1f, -t);  // ln 2 in two parts, the first exact
  r = fma_rn(n, -0x1.7f7d1cp-20f, r);
  float h = fma_rn(0x1.6a4f88p-10f, r, 0x1.123988p-7f);  // minimax of exp on |r| <= ln(2) / 2
  h = fma_rn(h, r, 0x1.5558aep-5f);
  h = fma_rn(h, r, 0x1.555492p-3f);
  h = fma_rn(h, r, 0x1.fffffcp-2f);
  const float u = fma_rn(h * r, r, r);
  const float k = v < 0.0f ? 0x1p-64f : 1.0f;
  const float s = float_from_bits((bits_from_float(j) << 23) + bits_from_float(k));  // 2^n k
  return {w, s + fma_rn(u, s, k), k};
}

NVFP4_HD float silu(float v) {
  const SiluParts parts = silu_parts(v);
  return (parts.numerator / parts.denominator) * parts.k;
}

NVFP4_HD float swiglu(float gate, float up) { return silu(gate) * up; }

// ------------------------------------------------------------------------------ scale layout

constexpr int kTileRows = 128;
constexpr int kTileCols = 4;
constexpr int kTileBytes = kTileRows * kTileCols;

NVFP4_HD int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Offset of scale (r, c) in the 128x4 layout whose rows of tiles are `tiles_per_row` tiles long.
NVFP4_HD int64_t swizzled_offset(int64_t r, int64_t c, int64_t tiles_per_row) {
  return ((r / kTileRows) * tiles_per_row + c / kTileCols) * kTileBytes + (r % 32) * 16 +
         ((r % kTileRows) / 32) * 4 + c % kTileCols;
}

}  // namespace nvfp4
