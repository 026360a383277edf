// Runs the kernels of csrc/cuda on the emulator and compares them with nvfp4.h written out plainly.
//
// Producers, dequantize, layouts, global_scale and epilogue: byte for byte, every byte of every
// buffer, in memory that starts as 0x7F and ends at a page that can't be read. gemm_small_m: the
// exact sum within FP32 accumulation. Prints one line per group; returns
// the number of failed cases.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "buffer.h"
#include "cuda/small_m_plan.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "nvfp4.h"

using namespace nvfp4;

namespace {

int failures = 0;

std::mt19937 rng(7);
float uniform() { return static_cast<float>(rng()) * 0x1p-32f; }
float normal() {
  float sum = -6.0f;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

const char* name_of(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bfloat16" : "float16";
}

struct Group {
  std::string name;
  long cases = 0, failed = 0;

  explicit Group(std::string n) : name(std::move(n)) {}
  ~Group() {
    std::printf("%-18s %6ld cases %4ld failed\n", name.c_str(), cases, failed);
    if (failed || !cases) ++failures;
  }
  void expect(bool right, const std::string& what) {
    ++cases;
    if (right) return;
    if (failed++ < 5) std::printf("  %s: %s\n", name.c_str(), what.c_str());
  }
  void same(Buffer& got, Buffer& want, const std::string& what) {
    int64_t i = 0;
    while (i < got.size() && got.data()[i] == want.data()[i]) ++i;
    char where[96] = "";
    if (i < got.size()) {
      std::snprintf(where, sizeof(where), " byte %lld: %02x, expected %02x",
                    static_cast<long long>(i), got.data()[i], want.data()[i]);
    }
    expect(i == got.size(), what + where);
  }
};

std::string describe(std::initializer_list<std::pair<const char*, double>> values) {
  std::string s;
  for (const auto& [key, value] : values) {
    char text[48];
    std::snprintf(text, sizeof(text), "%s=%g ", key, value);
    s += text;
  }
  return s;
}

// Kinds of input, from ordinary to hostile.
enum Kind { kNormal, kHeavyTailed, kTinyBlocks, kHuge, kZeroBlocks, kNonFinite, kAnyBits, kKinds };

void fill(Buffer& b, DType t, int64_t rows, int64_t cols, int64_t stride, Kind kind) {
  for (int64_t r = 0; r < rows; ++r) {
    float block = 1.0f;
    for (int64_t c = 0; c < cols; ++c) {
      if (c % 16 == 0) {
        block = kind == kTinyBlocks   ? std::ldexp(1.0f, -static_cast<int>(rng() % 24))
                : kind == kHuge       ? 0x1p10f
                : kind == kZeroBlocks ? static_cast<float>(rng() % 2)
                                      : 1.0f;
      }
      float v = normal() * block;
      if (kind == kHeavyTailed && rng() % 16 == 0) v *= 100.0f;
      if (kind == kHuge && t != DType::kFloat16) v *= 0x1p60f;
      if (kind == kZeroBlocks && rng() % 8 == 0) v = rng() % 2 ? 0.0f : -0.0f;
      if (kind == kNonFinite && rng() % 100 == 0) {
        v = float_from_bits(rng() % 3 == 0 ? 0x7FC00000u : rng() % 2 ? 0x7F800000u : 0xFF800000u);
      }
      if (kind == kAnyBits) {
        const uint32_t bits = rng();
        if (t == DType::kFloat32) {
          b.as<uint32_t>()[r * stride + c] = bits;
        } else {
          b.as<uint16_t>()[r * stride + c] = static_cast<uint16_t>(bits);
        }
        continue;
      }
      store(b.data(), t, r * stride + c, v);
    }
  }
}

// ------------------------------------------------------------------------------------- producers

void plain_quantize(const QuantizeParams& p, bool is_swiglu) {
  const int64_t cols = p.k / kBlockSize;
  const int64_t tiles = round_up(cols, kTileCols) / kTileCols;
  const float g = p.global_scale.device ? *p.global_scale.device : p.global_scale.value;
  if (p.swizzled) {
    std::memset(p.block_scale, 0, round_up(p.padded_rows, kTileRows) * tiles * kTileCols);
  } else {
    std::memset(p.block_scale, 0, p.padded_rows * cols);
  }
  std::memset(p.data, 0, p.padded_rows * p.k / 2);
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      float v[kBlockSize], amax = 0.0f;
      bool finite = true;
      for (int i = 0; i < kBlockSize; ++i) {
        const int64_t at = r * p.x_row_stride + c * kBlockSize + i;
        v[i] = load(p.x, p.x_type, at);
        if (is_swiglu) v[i] = swiglu(v[i], load(p.x, p.x_type, at + p.k));
        finite = finite && is_finite(v[i]);
        if (is_finite(v[i])) amax = std::fmax(amax, std::fabs(v[i]));
      }
      const BlockScale s = make_block_scale(amax, finite, g);
      p.block_scale[p.swizzled ? swizzled_offset(r, c, tiles) : r * cols + c] = s.code;
      for (int i = 0; i < kBlockSize; ++i) {
        p.data[(r * p.k + c * kBlockSize + i) / 2] |= quantize_element(v[i], s.divisor)
                                                      << (i % 2 ? 4 : 0);
      }
    }
  }
}

void test_quantize(bool is_swiglu) {
  Group group(is_swiglu ? "swiglu_quantize" : "quantize");
  const int64_t shapes[][2] = {{1, 16},   {5, 48},   {3, 528}, {130, 80},
                               {2, 1104}, {33, 512}, {700, 32}};
  const float nan = float_from_bits(kNanFloat32);
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (const auto& shape : shapes) {
        QuantizeParams p;
        p.x_type = type;
        p.rows = shape[0];
        p.k = shape[1];
        const int64_t width = is_swiglu ? 2 * p.k : p.k;
        const int layout = static_cast<int>(rng() % 3);  // aligned, odd stride, misaligned base
        p.x_row_stride = width + (layout == 0 ? 8 * static_cast<int64_t>(rng() % 2) : layout == 1);
        p.padded_rows = p.rows + (rng() % 2 ? 0 : rng() % 140);
        p.swizzled = rng() % 3 != 0;
        Buffer x(((p.rows - 1) * p.x_row_stride + width) * size_of(type),
                 layout == 2 ? size_of(type) : 0);
        fill(x, type, p.rows, width, p.x_row_stride, static_cast<Kind>(kind));
        p.x = x.data();
        const float scales[] = {1.0f, 0.01f, 3e-6f, 1e20f, 1e-30f, 0.0f, nan, -1.0f};
        Buffer g(4);
        *g.as<float>() = scales[rng() % (rng() % 3 ? 3 : 8)];
        if (rng() % 2) {
          p.global_scale.device = g.as<float>();
        } else {
          p.global_scale.value = *g.as<float>();
        }
        const int64_t cols = p.k / kBlockSize;
        const int64_t scale_bytes =
            p.swizzled ? round_up(p.padded_rows, kTileRows) * round_up(cols, kTileCols)
                       : p.padded_rows * cols;
        Buffer data(p.padded_rows * p.k / 2), scale(scale_bytes);
        Buffer want_data(data.size()), want_scale(scale_bytes);
        p.data = want_data.data();
        p.block_scale = want_scale.data();
        plain_quantize(p, is_swiglu);
        p.data = data.data();
        p.block_scale = scale.data();
        (is_swiglu ? cuda::swiglu_quantize : cuda::quantize)(p, nullptr);
        const std::string what = std::string(name_of(type)) + " " +
                                 describe({{"rows", p.rows},
                                           {"k", p.k},
                                           {"kind", kind},
                                           {"layout", layout},
                                           {"swizzled", p.swizzled},
                                           {"padded", p.padded_rows},
                                           {"g", *g.as<float>()}});
        group.same(scale, want_scale, what + "scale");
        group.same(data, want_data, what + "data");
      }
    }
  }
}

void test_global_scale(bool is_swiglu) {
  Group group(is_swiglu ? "swiglu_global_scale" : "global_scale");
  const int64_t shapes[][2] = {{1, 1},     {3, 7},      {5, 2048}, {40, 1000},
                               {1, 70001}, {200, 1024}, {4, 0}};
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (int kind = 0; kind < kKinds; ++kind) {
      for (const auto& shape : shapes) {
        AmaxParams p;
        p.x_type = type;
        p.rows = shape[0];
        p.swiglu = is_swiglu;
        p.cols = is_swiglu ? round_up(shape[1], 16) / 2 : shape[1];
        const int64_t width = is_swiglu ? 2 * p.cols : p.cols;
        p.x_row_stride = width + (rng() % 2 ? 0 : rng() % 9);
        Buffer x(((p.rows - 1) * p.x_row_stride + width) * size_of(type),
                 rng() % 2 ? size_of(type) : 0);
        fill(x, type, p.rows, width, p.x_row_stride, static_cast<Kind>(kind));
        float amax = 0.0f;
        for (int64_t r = 0; r < p.rows; ++r) {
          for (int64_t c = 0; c < p.cols; ++c) {
            float v = load(x.data(), type, r * p.x_row_stride + c);
            if (is_swiglu) v = swiglu(v, load(x.data(), type, r * p.x_row_stride + p.cols + c));
            if (is_finite(v)) amax = std::fmax(amax, std::fabs(v));
          }
        }
        Buffer out(4), want(4), scratch(cuda::global_scale_scratch_bytes(p));
        *want.as<float>() = global_scale_from_amax(amax);
        p.x = x.data();
        p.out = out.as<float>();
        cuda::global_scale(p, scratch.data(), nullptr);
        group.same(out, want,
                   std::string(name_of(type)) +
                       describe({{"rows", p.rows}, {"cols", p.cols}, {"kind", kind}}));
      }
    }
  }
}

// ------------------------------------------------------------------------------ off the format

void random_bytes(Buffer& b) {
  for (int64_t i = 0; i < b.size(); ++i) b.data()[i] = static_cast<uint8_t>(rng());
}

void test_dequantize() {
  Group group("dequantize");
  const int64_t shapes[][2] = {{1, 16}, {5, 48}, {130, 80}, {3, 1104}, {200, 2064}};
  const float nan = float_from_bits(kNanFloat32), infinity = float_from_bits(0x7F800000u);
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const float g : {1.0f, 0.3f, 0x1.8p-120f, 0x1.cp120f, nan, infinity}) {
      for (const auto& shape : shapes) {
        DequantizeParams p;
        p.out_type = type;
        p.k = shape[1];
        p.row_begin = rng() % shape[0];
        p.rows = shape[0] - p.row_begin;
        p.swizzled = rng() % 2;
        const int64_t cols = p.k / kBlockSize, tiles = round_up(cols, kTileCols) / kTileCols;
        Buffer data(shape[0] * p.k / 2),
            scale(p.swizzled ? round_up(shape[0], 128) * tiles * 4 : shape[0] * cols);
        random_bytes(data);
        random_bytes(scale);  // negative scales and NaN included
        p.data = data.data();
        p.block_scale = scale.data();
        Buffer device_g(4);
        *device_g.as<float>() = g;
        if (rng() % 2) {
          p.global_scale.device = device_g.as<float>();
        } else {
          p.global_scale.value = g;
        }
        const int64_t misalign = rng() % 3 ? 0 : size_of(type);
        Buffer out(p.rows * p.k * size_of(type), misalign), want(out.size());
        for (int64_t r = 0; r < p.rows; ++r) {
          for (int64_t c = 0; c < p.k; ++c) {
            const int64_t row = p.row_begin + r, col = c / kBlockSize;
            const uint8_t code = data.data()[(row * p.k + c) / 2] >> (c % 2 ? 4 : 0) & 0xF;
            const uint8_t s =
                scale.data()[p.swizzled ? swizzled_offset(row, col, tiles) : row * cols + col];
            store(want.data(), type, r * p.k + c, e2m1_to_float(code) * e4m3_to_float(s) * g);
          }
        }
        p.out = out.data();
        cuda::dequantize(p, nullptr);
        group.same(out, want,
                   std::string(name_of(type)) + " " +
                       describe({{"rows", p.rows},
                                 {"k", p.k},
                                 {"g", g},
                                 {"swizzled", p.swizzled},
                                 {"misalign", misalign}}));
      }
    }
  }
}

// Both sides of a pair as dequantize makes each; one of them may have no rows.
void test_dequantize_pair() {
  Group group("dequantize_pair");
  const int64_t shapes[][3] = {{1, 3, 16}, {5, 130, 48}, {0, 7, 80}, {9, 0, 80}, {200, 33, 2064}};
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const auto& shape : shapes) {
      for (const int64_t misalign : {int64_t{0}, size_of(type)}) {
        DequantizePairParams pair;
        pair.k = shape[2];
        pair.out_type = type;
        const int64_t tiles = round_up(pair.k / kBlockSize, kTileCols) / kTileCols;
        std::vector<std::unique_ptr<Buffer>> buffers;
        const auto buffer = [&](int64_t size, int64_t off = 0) {
          buffers.push_back(std::make_unique<Buffer>(size, off));
          return buffers.back().get();
        };
        Buffer *outs[2], *wants[2];
        DequantizePairParams::Side* sides[2] = {&pair.a, &pair.b};
        for (int i = 0; i < 2; ++i) {
          const int64_t begin = shape[i] ? rng() % shape[i] : 0, rows = shape[i] - begin;
          Buffer *data = buffer(shape[i] * pair.k / 2),
                 *scale = buffer(round_up(shape[i], 128) * tiles * 4);
          random_bytes(*data);
          random_bytes(*scale);
          const int64_t bytes = rows * pair.k * size_of(type);
          outs[i] = buffer(bytes, i == 1 ? misalign : 0);
          wants[i] = buffer(bytes);
          *sides[i] = {data->data(), scale->data(), begin, rows, outs[i]->data()};
          DequantizeParams p;
          p.data = data->data();
          p.block_scale = scale->data();
          p.row_begin = begin;
          p.rows = rows;
          p.k = pair.k;
          p.out = wants[i]->data();
          p.out_type = type;
          cuda::dequantize(p, nullptr);
        }
        cuda::dequantize_pair(pair, nullptr);
        for (int i = 0; i < 2; ++i) {
          group.same(*outs[i], *wants[i],
                     std::string(name_of(type)) + " " +
                         describe({{"a", shape[0]}, {"b", shape[1]}, {"k", pair.k}, {"side", i}}));
        }
      }
    }
  }
}

void test_layouts() {
  Group group("scale layouts");
  const int64_t shapes[][2] = {{1, 1}, {5, 3}, {128, 4}, {129, 5}, {300, 32}, {33, 896}};
  for (const auto& shape : shapes) {
    for (const int misalign : {0, 1}) {
      SwizzleParams p;
      p.rows = shape[0];
      p.cols = shape[1];
      const int64_t tiles = round_up(p.cols, kTileCols) / kTileCols;
      Buffer linear(p.rows * p.cols, misalign);
      Buffer swizzled(round_up(p.rows, kTileRows) * tiles * kTileCols), want(swizzled.size());
      random_bytes(linear);
      std::memset(want.data(), 0, want.size());
      for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t c = 0; c < p.cols; ++c) {
          want.data()[swizzled_offset(r, c, tiles)] = linear.data()[r * p.cols + c];
        }
      }
      p.in = linear.data();
      p.out = swizzled.data();
      cuda::swizzle_scales(p, nullptr);
      const std::string what = describe({{"rows", p.rows}, {"cols", p.cols}});
      group.same(swizzled, want, what + "swizzle");
      Buffer back(linear.size(), misalign);
      p.in = swizzled.data();
      p.out = back.data();
      cuda::unswizzle_scales(p, nullptr);
      group.same(back, linear, what + "unswizzle");
    }
  }
}

void test_epilogue() {
  Group group("epilogue");
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const int64_t n : {1, 8, 30, 1028}) {
      for (const int bias_type : {-1, 0, 1, 2}) {
        EpilogueParams p;
        p.rows = 1 + rng() % 9;
        p.n = n;
        p.out_type = type;
        p.out_row_stride = n + (rng() % 2 ? 0 : 4);
        Buffer acc(p.rows * n * 4), bias(n * 4), out(p.rows * p.out_row_stride * size_of(type));
        Buffer want(out.size());
        fill(acc, DType::kFloat32, p.rows, n, n, kNonFinite);
        p.acc = acc.as<float>();
        p.alpha.value = 0.37f;
        if (bias_type >= 0) {
          p.bias_type = static_cast<DType>(bias_type);
          fill(bias, p.bias_type, 1, n, n, kNormal);
          p.bias = bias.data();
        }
        for (int64_t r = 0; r < p.rows; ++r) {
          for (int64_t c = 0; c < n; ++c) {
            const float b = p.bias ? load(p.bias, p.bias_type, c) : 0.0f;
            store(want.data(), type, r * p.out_row_stride + c,
                  std::fma(p.alpha.value, p.acc[r * n + c], b));
          }
        }
        p.out = out.data();
        cuda::epilogue(p, nullptr);
        group.same(out, want, describe({{"rows", p.rows}, {"n", n}, {"bias", bias_type}}));
      }
    }
  }
}

// ------------------------------------------------------------------------------------------ GEMM

struct Packed {
  Buffer data, scale;
  int64_t rows, k, tiles;

  Packed(int64_t rows_, int64_t k_, int64_t misalign = 0)
      : data(rows_ * k_ / 2, misalign),
        scale(round_up(rows_, kTileRows) * round_up(k_ / kBlockSize, kTileCols)),
        rows(rows_),
        k(k_),
        tiles(round_up(k_ / kBlockSize, kTileCols) / kTileCols) {
    random_bytes(data);
    // Padding stays poisoned (NaN): it must not matter.
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < k / kBlockSize; ++c) {
        scale.data()[swizzled_offset(r, c, tiles)] = static_cast<uint8_t>(rng() % 0x7F);
      }
    }
  }
  double at(int64_t r, int64_t c) {
    const uint8_t code = data.data()[(r * k + c) / 2] >> (c % 2 ? 4 : 0) & 0xF;
    return double{e2m1_to_float(code)} *
           e4m3_to_float(scale.data()[swizzled_offset(r, c / kBlockSize, tiles)]);
  }
};

void test_gemm_shape(Group& group, int64_t m, int64_t n, int64_t k, int a_kind, bool nan_rows,
                     int64_t misalign) {
  const int64_t begin = rng() % 3;
  const DType a_type = a_kind == 2 ? DType::kFloat16 : DType::kBFloat16;
  const int64_t stride = k + (rng() % 2 ? 8 : 0) + (misalign ? 1 : 0);
  Packed b(n, k, misalign), packed_a(begin + m, k);
  Buffer dense(((begin + m - 1) * stride + k) * 2, misalign ? 2 : 0);
  fill(dense, a_type, begin + m, k, stride, kNormal);
  const int64_t bad_n = n / 2, bad_m = m / 2;
  if (nan_rows) {
    b.scale.data()[swizzled_offset(bad_n, (k / kBlockSize) / 2, b.tiles)] = kE4m3Nan;
    if (a_kind == 0) {
      packed_a.scale.data()[swizzled_offset(begin + bad_m, 0, packed_a.tiles)] = kE4m3Nan;
    }
  }
  SmallMParams p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.b = b.data.data();
  p.b_scale = b.scale.data();
  p.a_row_begin = begin;
  if (a_kind == 0) {
    p.a = packed_a.data.data();
    p.a_scale = packed_a.scale.data();
  } else {
    p.a = dense.data();
    p.a_type = a_type;
    p.a_row_stride = stride;
  }
  Buffer alpha(4), bias(n * 4);
  *alpha.as<float>() = 0.01f;
  if (rng() % 2) {
    p.alpha.device = alpha.as<float>();
  } else {
    p.alpha.value = 0.01f;
  }
  p.bias_type = static_cast<DType>(rng() % 3);
  fill(bias, p.bias_type, 1, n, n, kNormal);
  if (rng() % 3) p.bias = bias.data();
  p.out_type = static_cast<DType>(rng() % 3);
  Buffer out(m * n * size_of(p.out_type));
  p.out = out.data();
  cuda::gemm_small_m(p, nullptr);
  const std::string what = describe({{"m", m},
                                     {"n", n},
                                     {"k", k},
                                     {"a", a_kind},
                                     {"nan", nan_rows},
                                     {"misalign", misalign},
                                     {"sms", emulator::machine.sm_count}});
  std::vector<double> a_values(m * k), b_values(n * k);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < k; ++c) {
      a_values[r * k + c] = a_kind == 0 ? packed_a.at(begin + r, c)
                                        : double{load(p.a, a_type, (begin + r) * stride + c)};
    }
  }
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; ++c) b_values[r * k + c] = b.at(r, c);
  }
  int64_t wrong = 0, first = -1;
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t row = i / n, col = i % n;
    double sum = 0, magnitude = 0;
    for (int64_t c = 0; c < k; ++c) {
      const double product = a_values[row * k + c] * b_values[col * k + c];
      sum += product;
      magnitude += std::fabs(product);
    }
    const double bias_value = p.bias ? load(p.bias, p.bias_type, col) : 0.0;
    const float got = load(out.data(), p.out_type, i);
    bool right;
    if (sum != sum) {
      Buffer nan(4);
      store(nan.data(), p.out_type, 0, float_from_bits(kNanFloat32));
      right =
          std::memcmp(nan.data(), out.data() + i * size_of(p.out_type), size_of(p.out_type)) == 0;
    } else {
      const double want = 0.01f * sum + bias_value;
      const double ulp = p.out_type == DType::kFloat32   ? 0x1p-22
                         : p.out_type == DType::kFloat16 ? 0x1p-10
                                                         : 0x1p-7;
      const double allowed = 0.01f * magnitude * 0x1p-21 + ulp * std::fabs(want) + 1e-7;
      right = std::fabs(got - want) <= allowed ||
              (p.out_type == DType::kFloat16 && std::fabs(want) > 65000 && std::isinf(got));
    }
    if (!right && wrong++ == 0) first = i;
  }
  group.expect(wrong == 0, what + describe({{"wrong", wrong}, {"first", first}}));
}

void test_gemm() {
  Group group("gemm_small_m");
  const int64_t shapes[][3] = {{1, 1, 16},     {3, 8, 48},     {8, 24, 96},    {9, 136, 256},
                               {16, 40, 1040}, {17, 130, 384}, {32, 33, 2064}, {5, 300, 2048},
                               {32, 257, 512}, {1, 128, 0}};
  for (const auto& [m, n, k] : shapes) {
    for (int a_kind = 0; a_kind < 3; ++a_kind) {
      for (const int sms : {1, 5, 40}) {
        emulator::machine.index = sms;
        emulator::machine.sm_count = sms;
        test_gemm_shape(group, m, n, k, a_kind, k > 0 && sms == 5, 0);
      }
      if (k > 0) test_gemm_shape(group, m, n, k, a_kind, true, 1);
    }
  }
  emulator::machine = {};
}

// What every plan must be, on GPUs of many kinds: it fits, covers n and k, and wastes no block.
void test_plan() {
  Group group("plan_small_m");
  const cuda::SmallMDevice devices[] = {
      {132, 227 * 1024, 8, {0, 132, 132, 117, 120, 110, 102, 105, 120}},  // H200
      {108, 163 * 1024, 1, {}},                                           // A100
      {48, 99 * 1024, 8, {}},                                             // GB10
      {1, 99 * 1024, 2, {0, 0, 2}},
  };
  for (const auto& device : devices) {
    for (const int64_t m : {1, 8, 9, 16, 17, 32}) {
      for (const int64_t n : {1, 128, 136, 4096, 5376, 14336, 1000000}) {
        for (const int64_t k : {0, 16, 48, 128, 4096, 14336, 28672, 524288}) {
          const cuda::SmallMPlan p = cuda::plan_small_m(m, n, k, device);
          const int64_t covered = int64_t{p.chunks} * p.cluster * cuda::kChunkK;
          const int64_t without_last = covered / p.cluster * (p.cluster - 1);
          const int64_t strips = (n + kTileRows - 1) / kTileRows * cuda::kTileStrips;
          const bool right =
              p.ok() && p.m_tiles * cuda::kMTileRows >= m && p.strips * p.k_warps >= 1 &&
              p.threads() <= cuda::kMaxSmallMThreads && covered >= k &&
              (p.cluster == 1 || without_last < k) &&
              p.blocks == (strips + p.strips - 1) / p.strips * p.cluster &&
              (p.segment == p.chunks || (p.segment > 0 && p.segment % p.k_warps == 0)) &&
              p.shared_bytes <= device.shared_per_block && p.cluster <= device.max_cluster;
          group.expect(right, describe({{"sms", device.sm_count},
                                        {"m", m},
                                        {"n", n},
                                        {"k", k},
                                        {"strips", p.strips},
                                        {"k_warps", p.k_warps},
                                        {"cluster", p.cluster},
                                        {"segment", p.segment},
                                        {"blocks", p.blocks},
                                        {"shared", p.shared_bytes}}));
        }
      }
    }
  }
  cuda::SmallMDevice tiny = devices[3];
  tiny.shared_per_block = 12 * 1024;
  group.expect(!cuda::plan_small_m(32, 128, 128, tiny).ok(), "a plan that cannot fit");
  group.expect(cuda::plan_small_m(8, 128, 128, tiny).ok(), "a plan that can");
}

}  // namespace

// "blackwell": the quantizers alone, as on a GPU whose code doesn't wait for the kernel ahead: none
// may start early there.
int main(int argc, char** argv) {
  const bool blackwell = argc > 1 && std::string(argv[1]) == "blackwell";
  if (blackwell) emulator::machine.cc_major = 10;
  test_quantize(false);
  test_quantize(true);
  const int early = emulator::machine.early_starts;
  if (blackwell != (early == 0)) {
    std::printf("%d quantizers start early on compute capability %d\n", early,
                emulator::machine.cc_major);
    ++failures;
  }
  if (blackwell) return failures;
  test_global_scale(false);
  test_global_scale(true);
  test_dequantize();
  test_dequantize_pair();
  test_layouts();
  test_epilogue();
  test_plan();
  test_gemm();
  return failures;
}
