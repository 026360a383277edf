// The producers' arithmetic without slow instructions: same bytes as nvfp4.h, fewer instructions.
//
//   r = 1/d to an ulp or two, once a block      (hardware reciprocal, one Newton step)
//   t = fma(d t0 - x, -r, t0), t0 = x r         correctly rounded where the decision needs it
//   code = e2m1_rn(t) by one rounding add
//
// Every function says the range in which it equals its plain form in nvfp4.h; outside, the kernels
// take the plain form. Host and device compile the same text, so tests/test_kernel_math.py holds
// these to nvfp4.h without a GPU, with the hardware reciprocal replaced by every value within an
// ulp of the exact one.
#pragma once

#include "../nvfp4.h"

#if defined(__CUDA_ARCH__)
#include <cuda_fp16.h>
#endif

// Blackwell converts FP32 pairs to E2M1 in one instruction; elsewhere encode8_software does. A test
// that runs the Blackwell kernels on a CPU defines this, and encode8_hardware.
#if !defined(NVFP4_HARDWARE_E2M1)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__))
#define NVFP4_HARDWARE_E2M1 1
#else
#define NVFP4_HARDWARE_E2M1 0
#endif
#endif

namespace nvfp4::cuda {

// ------------------------------------------------------------------- instructions, and their host
// stand-ins

// 1/x within an ulp, for x in [2^-120, 2^120]. `RcpUlps` shifts the host's answer, for tests.
template <int RcpUlps = 0>
NVFP4_HD float approximate_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return float_from_bits(bits_from_float(1.0f / x) + RcpUlps);
#endif
}

// max(|a|, |b|) with the sign of a; b > 0.
NVFP4_HD float max_magnitude_signed(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  float r;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
#elif defined(__CUDA_ARCH__)
  return copysignf(fmaxf(fabsf(a), b), a);
#else
  return std::copysign(std::fmax(std::fabs(a), b), a);
#endif
}

// The FP16 bits of two values, rounded to nearest even: `low` in bits 0..15.
NVFP4_HD uint32_t round_to_halves(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
#else
  const _Float16 halves[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32_t r;
  std::memcpy(&r, halves, sizeof(r));
  return r;
#endif
}

// min(|h|, limit) with the sign of h, for both halves of a word; no NaN.
NVFP4_HD uint32_t clamp_halves(uint32_t h, uint16_t limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t r;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(h), "r"(limit * 0x10001u));
  return r;
#else
  const uint32_t low = h & 0x7FFFu, high = h >> 16 & 0x7FFFu;
  return (h & 0x80008000u) | (low < limit ? low : limit) | (high < limit ? high : limit) << 16;
#endif
}

// Bytes 1 and 3 of a, then of b: the high bytes of four halves.
NVFP4_HD uint32_t high_bytes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x7531);
#else
  return ((a >> 8) & 0xFFu) | ((a >> 24) << 8) | ((b >> 8) & 0xFFu) << 16 | (b >> 24) << 24;
#endif
}

// mask ? a : b, bit by bit: one LOP3.
NVFP4_HD uint32_t bit_select(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

// ----------------------------------------------------------------------------------- E2M1 codes

// The quotients of a block are computed as t * kQuotientScale. FP16's subnormals then have E2M1's
// spacing, so that a rounded t converts to a half whose high byte is s000eem?.
constexpr float kQuotientScale = NVFP4_HARDWARE_E2M1 ? 1.0f : 0x1p-14f;

// A value whose FP16 form has the E2M1 code of t / 2^-14 in bits 15 and 11..9, for |t| < 7 * 2^-14;
// above, one that clamp_halves makes so. Signed zeros keep their sign.
NVFP4_HD float e2m1_rounded(float t) {
  // At least 1 * 2^-14, below which E2M1's spacing stays what it is there: half of the power of two
  // at or below m.
  const float m = max_magnitude_signed(t, 0x1p-14f);
  // In 2^22 m + t the last bit is worth that spacing, and 2^22 m is a multiple of it: the add
  // rounds t to the E2M1 grid. To nearest even: at a tie t has few bits, so that 2^22 m is an even
  // multiple. Taking away a quarter of m less than was added leaves a non-zero value, so that a
  // zero keeps its sign; the quarter ends up below the code's bits, as none above 1.75 * 2^n is
  // left there.
  const float rounded = fma_rn(m, 0x1p22f, t);
  return fma_rn(m, -(0x1p22f - 0.25f), rounded);
}

// Eight codes of t[i] / 2^-14, element 0 in the low nibble. clamp: some |t[i]| may be 7 * 2^-14 or
// more.
NVFP4_HD uint32_t encode8_software(const float (&t)[8], bool clamp) {
  float v[8];
  for (int i = 0; i < 8; ++i) v[i] = e2m1_rounded(t[i]);
  uint32_t h[4] = {round_to_halves(v[0], v[2]), round_to_halves(v[4], v[6]),
                   round_to_halves(v[1], v[3]), round_to_halves(v[5], v[7])};
  if (clamp) {
    constexpr uint16_t kBelow8 = 0x0FFF;  // code 7, at 2^-14
    for (int i = 0; i < 4; ++i) h[i] = clamp_halves(h[i], kBelow8);
  }
  // Even elements in the bytes of one word, odd elements in the other, each s000eem?.
  const uint32_t even = high_bytes(h[0], h[1]), odd = high_bytes(h[2], h[3]);
  const uint32_t low = bit_select(0x08080808u, even >> 4, even >> 1);
  const uint32_t high = bit_select(0x80808080u, odd, odd << 3);
  return bit_select(0x0F0F0F0Fu, low, high);
}

#if NVFP4_HARDWARE_E2M1 && defined(__CUDA_ARCH__)
// The same of t[i] itself; saturates.
__device__ __forceinline__ uint32_t encode8_hardware(const float (&t)[8]) {
  uint32_t word;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(word)
      : "f"(t[0]), "f"(t[1]), "f"(t[2]), "f"(t[3]), "f"(t[4]), "f"(t[5]), "f"(t[6]), "f"(t[7]));
  return word;
}
#endif

// Eight codes of t[i] / kQuotientScale. clamp: some |t[i]| may reach 7 of them.
NVFP4_HD uint32_t encode8(const float (&t)[8], bool clamp) {
#if NVFP4_HARDWARE_E2M1
  return encode8_hardware(t);
#else
  return encode8_software(t, clamp);
#endif
}

// -------------------------------------------------------------------------------------- division

// 1/d, nearly correctly rounded.
template <int RcpUlps = 0>
NVFP4_HD float refined_reciprocal(float d) {
  const float r = approximate_reciprocal<RcpUlps>(d);
  return fma_rn(fma_rn(-d, r, 1.0f), r, r);
}

// The one mantissa for which a reciprocal within an ulp may leave the quotient wrong.
NVFP4_HD bool is_all_ones(float d) { return (~bits_from_float(d) & 0x7FFFFFu) == 0; }

// x / d given r = refined_reciprocal(d). The residual is taken as d t0 - x so that the sign of a
// zero x survives. Not always the correctly rounded quotient, but on the same side of every E2M1
// decision point: see test_kernel_math.py. d in [2^-90, 2^114], not all ones; d = r = 0 gives x's
// signed zero.
NVFP4_HD float quotient(float x, float d, float r) {
  const float t0 = x * r;
  return fma_rn(fma_rn(d, t0, -x), -r, t0);
}

// a / d correctly rounded (Markstein): a second correction, of a faithful quotient.
NVFP4_HD float quotient_exact(float a, float d, float r) {
  const float t = quotient(a, d, r);
  return fma_rn(fma_rn(d, t, -a), -r, t);
}

// ----------------------------------------------------------------------------------- block scale

// g as the kernels use it, once a thread.
struct GlobalScale {
  float g, reciprocal;
  float amax_limit;  // fast_block_scale is for amax up to here; negative where it is for none
};

template <int RcpUlps = 0>
NVFP4_HD GlobalScale prepare_global_scale(float g) {
  bool fast = g >= 0x1p-80f && g <= 0x1p40f;
  // No divisor may be all ones: a UE4M3 scale is one of eight significands times a power of two.
  for (int i = 8; i < 16; ++i) fast = fast && !is_all_ones(static_cast<float>(i) * g);
  return {g, refined_reciprocal<RcpUlps>(g), fast ? 0x1p40f : -1.0f};
}

struct FastBlockScale {
  uint8_t code;
  float divisor;     // float(s) * g / quotient_scale
  float reciprocal;  // of it; both are 0 where s is 0: every quotient is a signed zero then
  bool fast;         // false: use make_block_scale and quantize_element instead
  bool clamp;        // some quotient may reach 7
};

// Equals e4m3_from_float for v >= 0.
NVFP4_HD uint8_t e4m3_encode(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(v));
  return static_cast<uint8_t>(pair);
#else
  return e4m3_from_float(v);
#endif
}

// Equals e4m3_to_float, but for the bits of a NaN.
NVFP4_HD float e4m3_decode(uint8_t code) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code)));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(halves & 0xFFFFu)));
#else
  return e4m3_to_float(code);
#endif
}

// Equals make_block_scale where `fast` comes back true. amax >= 0, Inf or NaN where the block
// holds one: neither is at most the limit. Up to the limit no residual is rounded but where the
// scale is 0 all the same. quotient_scale: a power of two, what quotients come out times.
template <int RcpUlps = 0>
NVFP4_HD FastBlockScale fast_block_scale(float amax, const GlobalScale& g,
                                         float quotient_scale = kQuotientScale) {
  // Division by 6 with one correction: exact for all mantissas (tested exhaustively).
  constexpr float kSixth = 1.0f / kE2m1Max;
  const float sixth = quotient(amax, kE2m1Max, kSixth);
  const float ratio = quotient_exact(sixth, g.g, g.reciprocal);
  FastBlockScale b;
  b.code = e4m3_encode(ratio);
  const float s32 = e4m3_decode(b.code) * g.g;
  b.divisor = s32 * (1.0f / quotient_scale);
  b.reciprocal = b.code == 0 ? 0.0f : refined_reciprocal<RcpUlps>(b.divisor);
  b.fast = amax <= g.amax_limit;
  b.clamp = !(amax * b.reciprocal < 6.9f * quotient_scale);
  return b;
}

// ---------------------------------------------------------------------------------------- SwiGLU

// Above this, fast_silu is not to be used.
constexpr float kFastSiluMax = 60.0f;

// silu(v) for |v| <= kFastSiluMax, the same bytes: there no clamp acts, no power of two is needed
// to keep the quotient normal, and the divide needs no special case. kFewValues: v is a BF16 or an
// FP16 and not kFastSiluException; for those the short division is tested one by one.
constexpr float kFastSiluException = 0x1p-23f;  // its divisor's mantissa is all ones

template <bool kFewValues, int RcpUlps = 0>
NVFP4_HD float fast_silu(float v) {
  const float j = fma_rn(v, -0x1.715476p+0f, 0x1.8p+23f);
  const float n = j - 0x1.8p+23f;
  float r = fma_rn(n, -0x1.62e4p-1f, -v);
  r = fma_rn(n, -0x1.7f7d1cp-20f, r);
  float h = fma_rn(0x1.6a4f88p-10f, r, 0x1.123988p-7f);
  h = fma_rn(h, r, 0x1.5558aep-5f);
  h = fma_rn(h, r, 0x1.555492p-3f);
  h = fma_rn(h, r, 0x1.fffffcp-2f);
  const float u = fma_rn(h * r, r, r);
  const float s = float_from_bits((bits_from_float(j) << 23) + 0x3F800000u);
  const float d = s + fma_rn(u, s, 1.0f);
  if (!kFewValues) return v / d;
  return quotient(v, d, approximate_reciprocal<RcpUlps>(d));
}

}  // namespace nvfp4::cuda
