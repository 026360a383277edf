// What the tests of fused GEMMs on the emulator share: a problem, and what its result must be.
#pragma once

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "buffer.h"

namespace nvfp4 {

inline std::mt19937 rng(5);
inline float uniform() { return static_cast<float>(rng()) * 0x1p-31f - 1.0f; }

// Packed rows, scale bytes below `most_scale`; the scales' padding stays NaN: it must not matter.
struct Packed {
  int64_t k, tiles;
  Buffer data, scale;

  Packed(int64_t rows, int64_t columns, uint32_t most_scale)
      : k(columns),
        tiles((k / kBlockSize + kTileCols - 1) / kTileCols),
        data(rows * k / 2),
        scale(round_up(rows, kTileRows) * tiles * kTileCols) {
    for (int64_t i = 0; i < rows * k / 2; ++i) data.data()[i] = static_cast<uint8_t>(rng());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < k / kBlockSize; ++c) {
        scale.data()[swizzled_offset(r, c, tiles)] = static_cast<uint8_t>(rng() % most_scale);
      }
    }
  }
  double at(int64_t r, int64_t c) {
    return double{e2m1_to_float(data.data()[(r * k + c) / 2] >> (c % 2 ? 4 : 0) & 0xF)} *
           e4m3_to_float(scale.data()[swizzled_offset(r, c / kBlockSize, tiles)]);
  }
};

enum Kind { kPacked, kBf16, kFp16, kKinds };

// out = alpha A B^T + bias of random values, alpha and bias here or on the device, any output.
// begin: rows of A before the problem's. nan_rows: a NaN scale of one row of B, and one of A, or
// an infinity at the end of a dense row, which must not meet zeros behind it.
struct FusedCase {
  static constexpr float kAlpha = 0.01f;
  int64_t m, n, k, begin, stride;
  int kind;
  Packed b, packed_a;
  Buffer dense, alpha, bias;
  std::unique_ptr<Buffer> out;
  SmallMParams p;

  FusedCase(int64_t m_, int64_t n_, int64_t k_, int kind_, int64_t begin_, uint32_t most_scale,
            bool nan_rows)
      : m(m_),
        n(n_),
        k(k_),
        begin(begin_),
        stride(k + 8),
        kind(kind_),
        b(n, k, most_scale),
        packed_a(kind == kPacked ? begin + m : 0, k, most_scale),
        dense(kind == kPacked ? 0 : ((begin + m - 1) * stride + k) * 2),
        alpha(4),
        bias(n * 4) {
    p.a_type = kind == kFp16 ? DType::kFloat16 : DType::kBFloat16;
    for (int64_t r = 0; kind != kPacked && r < begin + m; ++r) {
      for (int64_t c = 0; c < k; ++c) store(dense.data(), p.a_type, r * stride + c, uniform());
    }
    if (nan_rows) {
      b.scale.data()[swizzled_offset(n / 2, k / kBlockSize / 2, b.tiles)] = kE4m3Nan;
      if (kind == kPacked) {
        packed_a.scale.data()[swizzled_offset(begin + m / 2, 0, packed_a.tiles)] = kE4m3Nan;
      } else {
        store(dense.data(), p.a_type, (begin + m / 2) * stride + k - 1, INFINITY);
      }
    }
    p.m = m;
    p.n = n;
    p.k = k;
    p.b = b.data.data();
    p.b_scale = b.scale.data();
    p.a = kind == kPacked ? packed_a.data.data() : dense.data();
    if (kind == kPacked) p.a_scale = packed_a.scale.data();
    p.a_row_stride = stride;
    p.a_row_begin = begin;
    *alpha.as<float>() = kAlpha;
    if (rng() % 2) {
      p.alpha.device = alpha.as<float>();
    } else {
      p.alpha.value = kAlpha;
    }
    if (rng() % 2) {
      p.bias = bias.data();
      for (int64_t i = 0; i < n; ++i) bias.as<float>()[i] = uniform();
    }
    p.out_type = static_cast<DType>(rng() % 3);
    new_out();
  }

  // Another buffer for the result; gives the one before.
  std::unique_ptr<Buffer> new_out() {
    auto before = std::move(out);
    out = std::make_unique<Buffer>(m * n * size_of(p.out_type));
    p.out = out->data();
    return before;
  }

  // How many results are not the FP64 sum within FP32's accumulation and one rounding.
  int64_t wrong() {
    int64_t count = 0;
    for (int64_t i = 0; i < m * n; ++i) {
      const int64_t row = i / n, column = i % n;
      double sum = 0, magnitude = 0;
      for (int64_t c = 0; c < k; ++c) {
        const double left = kind == kPacked
                                ? packed_a.at(begin + row, c)
                                : load(dense.data(), p.a_type, (begin + row) * stride + c);
        const double product = left * b.at(column, c);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double want = double{kAlpha} * sum + (p.bias ? bias.as<float>()[column] : 0.0f);
      const float got = load(out->data(), p.out_type, i);
      if (right(i, want, got, magnitude) || count++ > 0) continue;
      std::printf("  first: row %ld, column %ld: %g, not %g\n", long(row), long(column), got, want);
    }
    return count;
  }

 private:
  bool right(int64_t i, double want, float got, double magnitude) {
    if (want != want) {
      const uint32_t nan = nan_of(p.out_type);
      return std::memcmp(&nan, out->data() + i * size_of(p.out_type), size_of(p.out_type)) == 0;
    }
    if (std::isinf(want)) return got == static_cast<float>(want);
    const double ulp = p.out_type == DType::kFloat32   ? 0x1p-22
                       : p.out_type == DType::kFloat16 ? 0x1p-10
                                                       : 0x1p-7;
    const double allowed = kAlpha * magnitude * 0x1p-21 + ulp * std::fabs(want) + 1e-7;
    return std::fabs(got - want) <= allowed ||
           (p.out_type == DType::kFloat16 && std::fabs(want) > 65000 && std::isinf(got));
  }
};

}  // namespace nvfp4
