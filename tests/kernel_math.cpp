// csrc/cuda/block_math.h against the plain forms in csrc/nvfp4.h, on the host.
//
// The hardware reciprocal is replaced by the correctly rounded one and by its two neighbours: what
// holds for all three holds for any instruction within an ulp. Prints one line per check; returns
// the number of checks that failed.
#include <cstdio>
#include <random>

#include "cuda/block_math.h"

using namespace nvfp4;
using namespace nvfp4::cuda;

namespace {

int failures = 0;

void report(const char* check, long long cases, long long wrong, float a = 0, float b = 0) {
  std::printf("%-44s %12lld cases %8lld wrong", check, cases, wrong);
  if (wrong) std::printf("   first: %a, %a", a, b);
  std::printf("\n");
  if (wrong || cases == 0) ++failures;
}

float bf16(uint32_t bits) { return float_from_bits(bits << 16); }

float half_to_float(uint32_t bits) {
  const float magnitude = float_from_bits((bits & 0x7FFFu) << 13) * 0x1p112f;
  return bits & 0x8000u ? -magnitude : magnitude;
}

struct Tally {
  long long cases = 0, wrong = 0;
  float a = 0, b = 0;

  void add(bool right, float x, float y) {
    ++cases;
    if (right) return;
    if (wrong++ == 0) a = x, b = y;
  }
  void report(const char* check) const { ::report(check, cases, wrong, a, b); }
};

// The code that the kernels give t, taken from all eight places in turn.
uint8_t encode_one(float t, int place, bool clamp = false) {
  float eight[8] = {};
  eight[place] = t;
  return (encode8_software(eight, clamp) >> (4 * place)) & 0xFu;
}

void check_encode() {
  Tally plain, clamped;
  int place = 0;
  const auto both = [&](float t) {
    place = (place + 1) % 8;
    if (!(std::fabs(t) <= 0x1p112f)) return;  // fast_block_scale's limits leave no larger one
    const float scaled = t * 0x1p-14f;
    if (std::fabs(t) < 7.0f) plain.add(encode_one(scaled, place) == e2m1_from_float(t), t, 0);
    clamped.add(encode_one(scaled, place, true) == e2m1_from_float(t), t, 0);
  };
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) both(bf16(bits));
  const float points[] = {0.0f, 0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f, 2.0f,
                          2.5f, 3.0f,  3.5f, 4.0f,  5.0f, 6.0f,  6.5f, 7.0f};
  for (const float point : points) {
    for (int ulps = -300; ulps <= 300; ++ulps) {
      const int64_t bits = int64_t{bits_from_float(point)} + ulps;
      if (bits < 0) continue;
      both(float_from_bits(static_cast<uint32_t>(bits)));
      both(-float_from_bits(static_cast<uint32_t>(bits)));
    }
  }
  // Every FP32 value from below the first decision point to where the clamp is needed.
  for (uint32_t bits = bits_from_float(0.125f); bits < bits_from_float(7.0f); bits += 8) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = float_from_bits(bits + i) * (i % 2 ? -0x1p-14f : 0x1p-14f);
    const uint32_t word = encode8_software(t, false);
    for (int i = 0; i < 8; ++i) {
      plain.add(((word >> (4 * i)) & 0xFu) == e2m1_from_float(t[i] * 0x1p14f), t[i], 0);
    }
  }
  plain.report("encode8_software, |t| < 7");
  clamped.report("encode8_software, clamped");
}

// Where quotient() could go wrong: x / s within a few 2^-48 of the midpoint between a decision
// point b and the FP32 value next to it, on the side where the code changes. With S, X, M the
// integer mantissas of s, x and that midpoint, X 2^j - S M = -delta for a small delta: every such
// (S, X) is found by inverting the odd M.
template <int RcpUlps>
void check_decision_points() {
  struct Point {
    float b;
    int side;  // +1: codes differ above b + ulp / 2; -1: below b - ulp / 2
  };
  const Point points[] = {{0.25f, 1}, {0.75f, -1}, {1.25f, 1}, {1.75f, -1},
                          {2.5f, 1},  {3.5f, -1},  {5.0f, 1}};
  Tally tally;
  for (const Point& point : points) {
    const uint64_t mantissa = (bits_from_float(point.b) & 0x7FFFFFu) | 0x800000u;
    const uint64_t midpoint = 2 * mantissa + point.side;
    uint64_t inverse = 1;
    for (int i = 0; i < 6; ++i) inverse *= 2 - midpoint * inverse;
    for (int j = 24; j <= 25; ++j) {
      const uint64_t mask = (uint64_t{1} << j) - 1;
      for (int64_t delta = -3000; delta <= 3000; ++delta) {
        const uint64_t s_mantissa = (static_cast<uint64_t>(delta) * inverse) & mask;
        if (s_mantissa < (1u << 23) || s_mantissa >= (1u << 24)) continue;
        const uint64_t x_mantissa = (s_mantissa * midpoint - static_cast<uint64_t>(delta)) >> j;
        if (x_mantissa < (1u << 23) || x_mantissa >= (1u << 24)) continue;
        for (const int exponent : {-100, -23}) {
          const float s = std::ldexp(static_cast<float>(s_mantissa), exponent);
          if (is_all_ones(s)) continue;  // fast_block_scale declines it
          float x = std::ldexp(static_cast<float>(x_mantissa), exponent);
          // Into the binade where x / s is near b.
          while (x / s < point.b * 0.75f) x *= 2;
          while (x / s > point.b * 1.5f) x /= 2;
          const float d = s * 0x1p14f;
          const float t = quotient(x, d, refined_reciprocal<RcpUlps>(d));
          tally.add(encode_one(t, 0) == e2m1_from_float(x / s), x, s);
        }
      }
    }
  }
  tally.report("quotient next to every decision point");
}

template <int RcpUlps>
void check_quotient_bf16() {
  Tally tally;
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const uint8_t code = static_cast<uint8_t>(1 + random() % 126);
    const float g = float_from_bits((uint32_t{90} + random() % 50) << 23 | (random() & 0x7FFFFFu));
    const float s = e4m3_to_float(code) * g;
    const float d = s * 0x1p14f;
    const float r = refined_reciprocal<RcpUlps>(d);
    for (uint32_t bits = 0; bits < 0x7F80u; bits += 8) {
      float t[8];
      for (int i = 0; i < 8; ++i) {
        const float x = bf16(bits + i) * (i % 2 ? -1.0f : 1.0f);
        t[i] = x / s < 6.9f && x / s > -6.9f ? quotient(x, d, r) : 0.0f;
      }
      const uint32_t word = encode8_software(t, false);
      for (int i = 0; i < 8; ++i) {
        const float x = bf16(bits + i) * (i % 2 ? -1.0f : 1.0f);
        if (!(std::fabs(x / s) < 6.9f)) continue;
        tally.add(((word >> (4 * i)) & 0xFu) == quantize_element(x, s), x, s);
      }
    }
  }
  tally.report("quotient of every BF16, random scales");
}

void check_zero_scale() {
  Tally tally;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float x = bf16(bits);
    if (!is_finite(x)) continue;
    tally.add(encode_one(quotient(x, 0.0f, 0.0f), 3) == quantize_element(x, 0.0f), x, 0);
  }
  tally.report("quotient where the scale is 0");
}

void check_sixth() {
  Tally tally;
  for (uint32_t mantissa = 0; mantissa < (1u << 23); ++mantissa) {
    const float a = float_from_bits(0x3F800000u | mantissa);
    tally.add(quotient(a, kE2m1Max, 1.0f / kE2m1Max) == a / kE2m1Max, a, 0);
  }
  tally.report("amax / 6, every mantissa");
}

template <int RcpUlps>
void check_block_scale() {
  Tally tally, fast;
  std::mt19937 random(3);
  const auto one = [&](float amax, float g) {
    const GlobalScale prepared = prepare_global_scale<RcpUlps>(g);
    if (prepared.amax_limit < 0) return;
    const FastBlockScale b = fast_block_scale<RcpUlps>(amax, prepared);
    if (!b.fast) return fast.add(false, amax, g);
    fast.add(true, 0, 0);
    const BlockScale plain = make_block_scale(amax, true, g);
    bool right = b.code == plain.code && b.divisor == plain.divisor * 0x1p14f;
    // The largest element decides whether the form without a clamp may be taken.
    const float t = quotient(amax, b.divisor, b.reciprocal);
    const uint8_t want = quantize_element(amax, plain.divisor);
    right = right && encode_one(t, 1, true) == want && (b.clamp || encode_one(t, 1) == want);
    tally.add(right, amax, g);
  };
  for (int i = 0; i < 100000; ++i) {
    const float g = float_from_bits((uint32_t{60} + random() % 90) << 23 | (random() & 0x7FFFFFu));
    // amax such that the scale is anything from far below the least to saturated.
    const float ratio =
        float_from_bits((uint32_t{110} + random() % 28) << 23 | (random() & 0x7FFFFFu));
    const float amax = ratio * g * 6.0f;
    one(amax, g);
    one(bf16(bits_from_float(amax) >> 16), g);
  }
  // Both sides of every rounding boundary of UE4M3.
  for (int code = 0; code < 0x7E; ++code) {
    const float boundary = 0.5f * (e4m3_to_float(static_cast<uint8_t>(code)) +
                                   e4m3_to_float(static_cast<uint8_t>(code + 1)));
    for (int i = 0; i < 100; ++i) {
      const float g =
          i == 0 ? 1.0f
                 : float_from_bits((uint32_t{100} + random() % 40) << 23 | (random() & 0x7FFFFFu));
      const float centre = boundary * g * 6.0f;
      for (int ulps = -6; ulps <= 6; ++ulps) {
        one(float_from_bits(bits_from_float(centre) + static_cast<uint32_t>(ulps)), g);
      }
    }
  }
  // Far below the least scale: 0, however inexact the division.
  for (int exponent = -149; exponent < -60; ++exponent) one(std::ldexp(1.7f, exponent), 0x1.8p-70f);
  for (int exponent = -149; exponent < -60; ++exponent) one(std::ldexp(1.7f, exponent), 0x1.2p-80f);
  one(0.0f, 1.0f);
  one(0.0f, 0x1.8p-40f);
  tally.report("fast_block_scale");
  if (fast.wrong * 20 > fast.cases) report("fast_block_scale declines too often", fast.cases, 1);
  Tally refused;
  const float nan = float_from_bits(kNanFloat32), infinity = float_from_bits(0x7F800000u);
  for (const float bad : {nan, infinity, 0x1p100f}) {
    refused.add(!fast_block_scale(bad, prepare_global_scale(1.0f)).fast, bad, 1.0f);
  }
  // The last two make all ones of a scale: themselves, and times 15.
  for (const float bad :
       {nan, infinity, 0.0f, -1.0f, 0x1p-126f, 0x1p127f, 0x1.fffffep-7f, 0x1.11111p-3f}) {
    refused.add(!fast_block_scale(1.0f, prepare_global_scale(bad)).fast, 0, bad);
  }
  refused.report("fast_block_scale declines the unusual");
}

// Blackwell's conversion takes quotients themselves, the software one quotients times 2^-14: the
// same FP32 values but for that exponent, wherever they are normal. Below, either gives a zero.
template <int RcpUlps>
void check_quotients_of_either_conversion() {
  Tally tally;
  std::mt19937 random(5);
  for (int i = 0; i < 300000; ++i) {
    const float g = float_from_bits((uint32_t{60} + random() % 90) << 23 | (random() & 0x7FFFFFu));
    const float ratio =
        float_from_bits((uint32_t{110} + random() % 28) << 23 | (random() & 0x7FFFFFu));
    const GlobalScale prepared = prepare_global_scale<RcpUlps>(g);
    const float amax = ratio * g * 6.0f;
    const FastBlockScale software = fast_block_scale<RcpUlps>(amax, prepared, 0x1p-14f);
    const FastBlockScale hardware = fast_block_scale<RcpUlps>(amax, prepared, 1.0f);
    bool right = software.fast == hardware.fast && software.code == hardware.code;
    if (software.fast) {
      right = right && software.clamp == hardware.clamp;
      const float below = float_from_bits(bits_from_float(1.0f) - (random() & 0xFFFFFFu));
      const float x = random() % 2 ? amax * below : -amax * below;
      const float of_software = quotient(x, software.divisor, software.reciprocal);
      const float of_hardware = quotient(x, hardware.divisor, hardware.reciprocal);
      const bool normal = std::fabs(of_hardware) >= 0x1p-100f;
      right = right && std::signbit(of_software) == std::signbit(of_hardware) &&
              (normal ? of_hardware == of_software * 0x1p14f : std::fabs(of_software) < 0x1p-110f);
    }
    tally.add(right, amax, g);
  }
  tally.report("quotients of either conversion");
}

template <int RcpUlps>
void check_silu() {
  Tally few;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    for (const float v : {bf16(bits), half_to_float(bits)}) {
      if (!(std::fabs(v) <= kFastSiluMax) || v == kFastSiluException) continue;
      few.add(bits_from_float(fast_silu<true, RcpUlps>(v)) == bits_from_float(silu(v)), v, silu(v));
    }
  }
  few.report("fast_silu of every BF16 and FP16 gate");
}

void check_silu_fp32() {
  Tally many;
  std::mt19937 random(4);
  for (int i = 0; i < 500000; ++i) {
    const float v =
        float_from_bits(random() % (bits_from_float(kFastSiluMax) + 1) | (random() & 0x80000000u));
    many.add(bits_from_float(fast_silu<false>(v)) == bits_from_float(silu(v)), v, silu(v));
  }
  many.report("fast_silu of FP32 gates");
}

template <int RcpUlps>
void check_all() {
  std::printf("reciprocal off by %d ulp\n", RcpUlps);
  check_decision_points<RcpUlps>();
  check_quotient_bf16<RcpUlps>();
  check_block_scale<RcpUlps>();
  check_quotients_of_either_conversion<RcpUlps>();
  check_silu<RcpUlps>();
}

}  // namespace

int main() {
  check_encode();
  check_zero_scale();
  check_sixth();
  check_silu_fp32();
  check_all<0>();
  check_all<1>();
  check_all<-1>();
  return failures;
}
