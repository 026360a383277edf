// The exact GEMM: D = out(fma(alpha, acc, bias)), acc the exact sum rounded once to FP32.
//
// Packed A: one block of 16 has a dot product that is exact in FP32 (at most 20 significant bits).
// Block sums are added in FP64, exact for 64 blocks (multiples of 2^-20 below 2^33), then moved to
// a 64-bit fixed-point accumulator. Every step is exact, so tiling, threads and instruction set
// cannot change a byte.
//
// Dense A (BF16 or FP16): products are exact in FP64 and are added in FP64 in the order of k, the
// same at every tiling. That is exact while a row's partial sums span at most 53 bits, and else off
// by at most K * 2^-53 of sum |a b|, before the one rounding to FP32.
//
// NaN block scales are kept out of the arithmetic: a row or column that has one is NaN, by flag.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "floats.h"
#include "parallel.h"

namespace nvfp4::cpu {
namespace {

constexpr int kPanelCols = 32;     // columns of B that a register tile covers
constexpr int64_t kTileM = 256;    // of a thread's tile: its decoded chunks of A and B stay in L2
constexpr int64_t kTileN = 256;
constexpr int64_t kChunkK = 1024;  // 64 blocks: what FP64 adds exactly

struct TileKernels {
  int rows;
  void (*exact)(const float* a, int64_t a_stride, const float* b, int64_t depth, double* sums);
  void (*ordered)(const double* a, int64_t a_stride, const double* b, int64_t depth, double* sums);
};

// Two registers of accumulators a row, and as many rows as the register file holds beside them.
#pragma GCC push_options
#pragma GCC optimize("O3", "fp-contract=fast")
namespace baseline {
#define NVFP4_TILE_LANES 4
#define NVFP4_TILE_ROWS 4
#include "gemm_tile.inl"
#undef NVFP4_TILE_LANES
#undef NVFP4_TILE_ROWS
}  // namespace baseline
#pragma GCC pop_options

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define NVFP4_X86_TILES
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#pragma GCC optimize("O3", "fp-contract=fast")
namespace avx2 {
#define NVFP4_TILE_LANES 8
#define NVFP4_TILE_ROWS 6
#include "gemm_tile.inl"
#undef NVFP4_TILE_LANES
#undef NVFP4_TILE_ROWS
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx2,fma")
#pragma GCC optimize("O3", "fp-contract=fast")
namespace avx512 {
#define NVFP4_TILE_LANES 16
#define NVFP4_TILE_ROWS 8
#include "gemm_tile.inl"
#undef NVFP4_TILE_LANES
#undef NVFP4_TILE_ROWS
}  // namespace avx512
#pragma GCC pop_options
#endif

const TileKernels& tile_kernels() {
#if defined(NVFP4_X86_TILES)
  // NVFP4_CPU_ISA narrows the choice, so that a test can hold the paths to each other.
  const char* wanted = std::getenv("NVFP4_CPU_ISA");
  const std::string limit = wanted ? wanted : "";
  const bool allow_avx512 = limit.empty() || limit == "avx512";
  const bool allow_avx2 = allow_avx512 || limit == "avx2";
  if (allow_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
    return avx512::kTileKernels;
  }
  if (allow_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return avx2::kTileKernels;
  }
#endif
  return baseline::kTileKernels;
}

// E2M1 byte -> its two values, low nibble first.
struct PairTable {
  float value[256][2];
  PairTable() {
    for (int i = 0; i < 256; ++i) {
      value[i][0] = e2m1_to_float(i & 0xF);
      value[i][1] = e2m1_to_float(i >> 4);
    }
  }
};
const PairTable kPairs;

struct PackedOperand {
  const uint8_t* data;
  const uint8_t* scale;
  int64_t k, tiles_per_row;

  PackedOperand(const void* data, const uint8_t* scale, int64_t k)
      : data(static_cast<const uint8_t*>(data)),
        scale(scale),
        k(k),
        tiles_per_row(round_up(k / kBlockSize, kTileCols) / kTileCols) {}

  // The 16 values of block c of `row`, `stride` floats apart. Gives whether the block scale is NaN;
  // the values are then 0.
  template <typename Value>
  bool decode_block(int64_t row, int64_t c, Value* out, int64_t stride) const {
    const float s = e4m3_to_float(scale[swizzled_offset(row, c, tiles_per_row)]);
    const bool nan = s != s;
    const float factor = nan ? 0.0f : s;
    const uint8_t* in = data + row * (k / 2) + c * kBlockBytes;
    for (int i = 0; i < kBlockBytes; ++i) {
      out[2 * i * stride] = kPairs.value[in[i]][0] * factor;
      out[(2 * i + 1) * stride] = kPairs.value[in[i]][1] * factor;
    }
    return nan;
  }
};

// Values [k0, k0 + depth) of a dense row.
template <typename T, typename Value>
void load_dense(const GemmParams& p, int64_t row, int64_t k0, int64_t depth, Value* out) {
  const auto* in = static_cast<const typename T::Storage*>(p.a) + row * p.a_row_stride + k0;
  for (int64_t i = 0; i < depth; ++i) out[i] = T::load(in[i]);
}

// One thread's tile of D, rows [m0, m0 + rows) and columns [n0, n0 + cols). Value: what operands are
// decoded to, float for packed A (exact tiles), double for dense A (ordered tiles).
template <typename Value>
class TileWorker {
 public:
  static constexpr bool kExact = std::is_same_v<Value, float>;
  // Exact: units of 2^-20. Ordered: the FP64 sum itself.
  using Total = std::conditional_t<kExact, int64_t, double>;

  explicit TileWorker(const GemmParams& p)
      : p_(p),
        kernels_(tile_kernels()),
        max_rows_(round_up(std::min(p.m, kTileM), kernels_.rows)),
        max_cols_(round_up(std::min(p.n, kTileN), kPanelCols)),
        a_(max_rows_ * std::min(p.k, kChunkK)),
        b_(max_cols_ * std::min(p.k, kChunkK)),
        totals_(max_rows_ * max_cols_) {}

  void compute(int64_t m0, int64_t rows, int64_t n0, int64_t cols) {
    a_nan_.assign(rows, 0);
    b_nan_.assign(cols, 0);
    std::fill(totals_.begin(), totals_.end(), 0);
    for (int64_t k0 = 0; k0 < p_.k; k0 += kChunkK) {
      const int64_t depth = std::min(kChunkK, p_.k - k0);
      load_a(m0, rows, k0, depth);
      load_b(n0, cols, k0, depth);
      for (int64_t panel = 0; panel * kPanelCols < cols; ++panel) {
        for (int64_t r = 0; r < rows; r += kernels_.rows) multiply(r, panel, depth);
      }
    }
    store(m0, rows, n0, cols);
  }

 private:
  void load_a(int64_t m0, int64_t rows, int64_t k0, int64_t depth) {
    const PackedOperand packed(p_.a, p_.a_scale, p_.k);
    const int64_t padded = round_up(rows, kernels_.rows);
    for (int64_t r = 0; r < padded; ++r) {
      Value* out = a_.data() + r * depth;
      if (r >= rows) {
        std::fill(out, out + depth, Value{0});
      } else if (kExact) {
        for (int64_t c = 0; c < depth / kBlockSize; ++c) {
          a_nan_[r] |= packed.decode_block(m0 + r, k0 / kBlockSize + c, out + c * kBlockSize, 1);
        }
      } else if (p_.a_type == DType::kBFloat16) {
        load_dense<BFloat16>(p_, m0 + r, k0, depth, out);
      } else {
        load_dense<Float16>(p_, m0 + r, k0, depth, out);
      }
    }
  }

  void load_b(int64_t n0, int64_t cols, int64_t k0, int64_t depth) {
    const PackedOperand packed(p_.b, p_.b_scale, p_.k);
    for (int64_t panel = 0; panel * kPanelCols < cols; ++panel) {
      // By block, then by column: the block's 16 rows of the panel stay in L1 as columns fill them.
      for (int64_t block = 0; block < depth / kBlockSize; ++block) {
        Value* out = b_.data() + (panel * depth + block * kBlockSize) * kPanelCols;
        for (int64_t i = 0; i < kPanelCols; ++i) {
          const int64_t c = panel * kPanelCols + i;
          if (c < cols) {
            b_nan_[c] |= packed.decode_block(n0 + c, k0 / kBlockSize + block, out + i, kPanelCols);
          } else {
            for (int k = 0; k < kBlockSize; ++k) out[k * kPanelCols + i] = 0;
          }
        }
      }
    }
  }

  // Accumulators are kept by panel.
  int64_t first_of(int64_t r, int64_t panel) const { return (panel * max_rows_ + r) * kPanelCols; }

  void multiply(int64_t r, int64_t panel, int64_t depth) {
    const Value* a = a_.data() + r * depth;
    const Value* b = b_.data() + panel * depth * kPanelCols;
    Total* totals = totals_.data() + first_of(r, panel);
    if constexpr (kExact) {
      double sums[8 * kPanelCols];
      kernels_.exact(a, depth, b, depth, sums);
      for (int i = 0; i < kernels_.rows * kPanelCols; ++i) {
        totals[i] += static_cast<int64_t>(sums[i] * (int64_t{1} << kProductFractionBits));
      }
    } else {
      kernels_.ordered(a, depth, b, depth, totals);
    }
  }

  float accumulated(int64_t r, int64_t c) const {
    if (a_nan_[r] || b_nan_[c]) return float_from_bits(kNanFloat32);
    const Total total = totals_[first_of(r, c / kPanelCols) + c % kPanelCols];
    return static_cast<float>(total) * (kExact ? 1.0f / (1 << kProductFractionBits) : 1.0f);
  }

  void store(int64_t m0, int64_t rows, int64_t n0, int64_t cols) const {
    std::vector<float> bias(cols, 0.0f);
    if (p_.bias) {
      dispatch_float(p_.bias_type, [&](auto type) {
        using T = decltype(type);
        const auto* in = static_cast<const typename T::Storage*>(p_.bias) + n0;
        for (int64_t c = 0; c < cols; ++c) bias[c] = T::load(in[c]);
      });
    }
    dispatch_float(p_.out_type, [&](auto type) {
      using T = decltype(type);
      for (int64_t r = 0; r < rows; ++r) {
        auto* out = static_cast<typename T::Storage*>(p_.out) + (m0 + r) * p_.n + n0;
        for (int64_t c = 0; c < cols; ++c) {
          out[c] = T::store(fma_rn(p_.alpha.value, accumulated(r, c), bias[c]));
        }
      }
    });
  }

  const GemmParams& p_;
  const TileKernels& kernels_;
  const int64_t max_rows_, max_cols_;  // rounded up to a register tile's
  std::vector<Value> a_;  // (rows, depth), decoded
  std::vector<Value> b_;  // panels of (depth, kPanelCols), decoded
  std::vector<Total> totals_;
  std::vector<uint8_t> a_nan_, b_nan_;
};

template <typename Value>
void gemm_tiles(const GemmParams& p) {
  const int64_t tiles_m = round_up(p.m, kTileM) / kTileM, tiles_n = round_up(p.n, kTileN) / kTileN;
  parallel_for(tiles_m * tiles_n, 1, [&](int64_t begin, int64_t end) {
    TileWorker<Value> worker(p);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t m0 = tile % tiles_m * kTileM, n0 = tile / tiles_m * kTileN;
      worker.compute(m0, std::min(kTileM, p.m - m0), n0, std::min(kTileN, p.n - n0));
    }
  });
}

}  // namespace

void gemm(const GemmParams& p) {
  if (p.a_scale) {
    gemm_tiles<float>(p);
  } else {
    gemm_tiles<double>(p);
  }
}

}  // namespace nvfp4::cpu
