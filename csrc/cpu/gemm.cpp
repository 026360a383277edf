// The exact GEMM: D = out(fma(alpha, acc, bias)), acc the exact sum rounded once to FP32.
//
// Packed A: one block of 16 has a dot product that is exact in FP32 (at most 20 significant bits).
// Block sums are added in FP64, exact for 64 blocks (multiples of 2^-20 below 2^33), then moved to
// a 64-bit fixed-point accumulator. Every step is exact, so tiling, threads and instruction set
// cannot change a byte.
//
// One dense operand (BF16 or FP16): products are exact in FP64 and are added in FP64 in the order
// of k, the same at every tiling. That is exact while a row's partial sums span at most 53 bits,
// and else off by at most K * 2^-53 of sum |a b|, before the one rounding to FP32.
//
// NaN block scales are kept out of the arithmetic: a row or column that has one is NaN, by flag.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "../check.h"
#include "floats.h"
#include "parallel.h"

namespace nvfp4::cpu {
namespace {

constexpr int kPanelCols = 32;   // columns of B that a register tile covers
constexpr int64_t kTileM = 256;  // of a thread's tile: its decoded chunks of A and B stay in L2
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

// One product: D's rows and A's rows may be anywhere; K may be a slice of longer rows.
struct Product {
  Operand a, b;
  const int32_t* a_row = nullptr;              // row i of the product is A's row a_row[i]
  const int32_t* out_row = nullptr;            // and D's row out_row[i], none where negative
  int64_t a_row_begin = 0, out_row_begin = 0;  // where they are null: row i + begin
  int64_t m = 0, n = 0;
  int64_t k_begin = 0, k = 0;  // columns [k_begin, k_begin + k) of rows that are k_total long
  int64_t k_total = 0;
  float alpha = 1.0f;
  const void* bias = nullptr;
  DType bias_type = DType::kFloat32;
  const float* gamma = nullptr;
  void* out = nullptr;
  DType out_type = DType::kBFloat16;
};

// Reads an operand's rows as Value (float or double), a block of 16 along K at a time.
struct Reader {
  const Operand& operand;
  int64_t k_total, tiles_per_row;

  Reader(const Operand& operand, int64_t k_total)
      : operand(operand),
        k_total(k_total),
        tiles_per_row(round_up(k_total / kBlockSize, kTileCols) / kTileCols) {}

  // The 16 values of block c of `row`, `stride` values apart. Gives whether the block scale is NaN;
  // the values are then 0.
  template <typename Value>
  bool read(int64_t row, int64_t c, Value* out, int64_t stride) const {
    if (operand.scale == nullptr) {
      if (operand.type == DType::kBFloat16) return read_dense<BFloat16>(row, c, out, stride);
      return read_dense<Float16>(row, c, out, stride);
    }
    const int64_t offset = operand.swizzled ? swizzled_offset(row, c, tiles_per_row)
                                            : row * (k_total / kBlockSize) + c;
    const float s = e4m3_to_float(operand.scale[offset]);
    const bool nan = s != s;
    const float factor = nan ? 0.0f : s;
    const uint8_t* in =
        static_cast<const uint8_t*>(operand.data) + row * (k_total / 2) + c * kBlockBytes;
    for (int i = 0; i < kBlockBytes; ++i) {
      out[2 * i * stride] = kPairs.value[in[i]][0] * factor;
      out[(2 * i + 1) * stride] = kPairs.value[in[i]][1] * factor;
    }
    return nan;
  }

  template <typename T, typename Value>
  bool read_dense(int64_t row, int64_t c, Value* out, int64_t stride) const {
    const auto* in = static_cast<const typename T::Storage*>(operand.data) +
                     row * operand.row_stride + c * kBlockSize;
    for (int i = 0; i < kBlockSize; ++i) out[i * stride] = T::load(in[i]);
    return false;
  }
};

// One thread's tiles of D. Value: what operands are decoded to, float where both are packed (exact
// tiles), double where one is dense (ordered tiles).
template <typename Value>
class TileWorker {
 public:
  static constexpr bool kExact = std::is_same_v<Value, float>;
  // Exact: units of 2^-20. Ordered: the FP64 sum itself.
  using Total = std::conditional_t<kExact, int64_t, double>;

  // For products of at most `m` x `n` x `k`.
  TileWorker(int64_t m, int64_t n, int64_t k)
      : kernels_(tile_kernels()),
        max_rows_(round_up(std::min(m, kTileM), kernels_.rows)),
        a_(max_rows_ * std::min(k, kChunkK)),
        b_(round_up(std::min(n, kTileN), kPanelCols) * std::min(k, kChunkK)),
        totals_(max_rows_ * round_up(std::min(n, kTileN), kPanelCols)) {}

  // Rows [m0, m0 + rows) and columns [n0, n0 + cols) of p's D.
  void compute(const Product& p, int64_t m0, int64_t rows, int64_t n0, int64_t cols) {
    a_nan_.assign(rows, 0);
    b_nan_.assign(cols, 0);
    std::fill(totals_.begin(), totals_.end(), 0);
    for (int64_t k0 = 0; k0 < p.k; k0 += kChunkK) {
      const int64_t depth = std::min(kChunkK, p.k - k0);
      const int64_t block = (p.k_begin + k0) / kBlockSize;
      load_a(p, m0, rows, block, depth);
      load_b(p, n0, cols, block, depth);
      for (int64_t panel = 0; panel * kPanelCols < cols; ++panel) {
        for (int64_t r = 0; r < rows; r += kernels_.rows) multiply(r, panel, depth);
      }
    }
    store(p, m0, rows, n0, cols);
  }

 private:
  void load_a(const Product& p, int64_t m0, int64_t rows, int64_t block, int64_t depth) {
    const Reader reader(p.a, p.k_total);
    const int64_t padded = round_up(rows, kernels_.rows);
    for (int64_t r = 0; r < padded; ++r) {
      Value* out = a_.data() + r * depth;
      if (r >= rows) {
        std::fill(out, out + depth, Value{0});
        continue;
      }
      const int64_t row = p.a_row ? p.a_row[m0 + r] : p.a_row_begin + m0 + r;
      for (int64_t c = 0; c < depth / kBlockSize; ++c) {
        a_nan_[r] |= reader.read(row, block + c, out + c * kBlockSize, 1);
      }
    }
  }

  void load_b(const Product& p, int64_t n0, int64_t cols, int64_t block, int64_t depth) {
    const Reader reader(p.b, p.k_total);
    for (int64_t panel = 0; panel * kPanelCols < cols; ++panel) {
      // By block, then by column: the block's 16 rows of the panel stay in L1 as columns fill them.
      for (int64_t i = 0; i < depth / kBlockSize; ++i) {
        Value* out = b_.data() + (panel * depth + i * kBlockSize) * kPanelCols;
        for (int64_t j = 0; j < kPanelCols; ++j) {
          const int64_t c = panel * kPanelCols + j;
          if (c < cols) {
            b_nan_[c] |= reader.read(n0 + c, block + i, out + j, kPanelCols);
          } else {
            for (int k = 0; k < kBlockSize; ++k) out[k * kPanelCols + j] = 0;
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

  void store(const Product& p, int64_t m0, int64_t rows, int64_t n0, int64_t cols) const {
    std::vector<float> bias(cols, 0.0f);
    if (p.bias) {
      dispatch_float(p.bias_type, [&](auto type) {
        using T = decltype(type);
        const auto* in = static_cast<const typename T::Storage*>(p.bias) + n0;
        for (int64_t c = 0; c < cols; ++c) bias[c] = T::load(in[c]);
      });
    }
    dispatch_float(p.out_type, [&](auto type) {
      using T = decltype(type);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = p.out_row ? p.out_row[m0 + r] : p.out_row_begin + m0 + r;
        if (row < 0) continue;
        auto* out = static_cast<typename T::Storage*>(p.out) + row * p.n + n0;
        for (int64_t c = 0; c < cols; ++c) {
          const float value = fma_rn(p.alpha, accumulated(r, c), bias[c]);
          out[c] = T::store(p.gamma ? p.gamma[m0 + r] * value : value);
        }
      }
    });
  }

  const TileKernels& kernels_;
  const int64_t max_rows_;  // rounded up to a register tile's
  std::vector<Value> a_;    // (rows, depth), decoded
  std::vector<Value> b_;    // panels of (depth, kPanelCols), decoded
  std::vector<Total> totals_;
  std::vector<uint8_t> a_nan_, b_nan_;
};

// All tiles of all products, shared out over the threads.
template <typename Value>
void multiply_tiles(const std::vector<Product>& products) {
  struct Tile {
    const Product* product;
    int64_t m0, n0;
  };
  std::vector<Tile> tiles;
  int64_t m = 0, n = 0, k = 0;
  for (const Product& p : products) {
    m = std::max(m, p.m);
    n = std::max(n, p.n);
    k = std::max(k, p.k);
    for (int64_t n0 = 0; n0 < p.n; n0 += kTileN) {
      for (int64_t m0 = 0; m0 < p.m; m0 += kTileM) tiles.push_back({&p, m0, n0});
    }
  }
  parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    TileWorker<Value> worker(m, n, k);
    for (int64_t i = begin; i < end; ++i) {
      const Product& p = *tiles[i].product;
      const int64_t m0 = tiles[i].m0, n0 = tiles[i].n0;
      worker.compute(p, m0, std::min(kTileM, p.m - m0), n0, std::min(kTileN, p.n - n0));
    }
  });
}

void multiply(const std::vector<Product>& products, const Operand& a, const Operand& b) {
  if (a.scale && b.scale) {
    multiply_tiles<float>(products);
  } else {
    multiply_tiles<double>(products);
  }
}

// Offsets and indices come from the user: all are checked before anything is written.
void check_groups(const GroupedGemmParams& p) {
  const int64_t end = p.ragged_k ? p.k : p.m, unit = p.ragged_k ? kBlockSize : 1;
  int64_t previous = 0;
  for (int64_t e = 0; e < p.groups; ++e) {
    NVFP4_CHECK(p.offs[e] >= previous && p.offs[e] <= end && p.offs[e] % unit == 0, "offs[", e,
                "] must be ", p.ragged_k ? concat("a multiple of ", unit, " in [") : "in [",
                previous, ", ", end, "], got ", p.offs[e], ": offs are cumulative ends along ",
                p.ragged_k ? "K" : "M");
    previous = p.offs[e];
  }
  for (int64_t i = 0; p.gather && i < p.m; ++i) {
    NVFP4_CHECK(p.gather[i] >= 0 && p.gather[i] < p.a_rows, "gather[", i, "] must be in [0, ",
                p.a_rows, "), got ", p.gather[i]);
  }
  for (int64_t i = 0; p.scatter && i < p.m; ++i) {
    NVFP4_CHECK(p.scatter[i] >= -1 && p.scatter[i] < p.m, "scatter[", i, "] must be in [-1, ", p.m,
                "), got ", p.scatter[i], ": -1 drops the row");
  }
}

const char* advance(const void* base, int64_t bytes) {
  return static_cast<const char*>(base) + bytes;
}

int64_t bytes_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// Operand `group` of a stack of `rows` x `k`.
Operand operand_of_group(const Operand& stack, int64_t group, int64_t rows, int64_t k) {
  Operand one = stack;
  if (stack.scale == nullptr) {
    one.data = advance(stack.data, group * rows * stack.row_stride * bytes_of(stack.type));
    return one;
  }
  const int64_t cols = k / kBlockSize;
  one.data = advance(stack.data, group * rows * (k / 2));
  one.scale += group * (stack.swizzled ? round_up(rows, kTileRows) * round_up(cols, kTileCols)
                                       : rows * cols);
  return one;
}

// Rows [begin, ...) of a ragged-M problem, through gather and scatter.
void set_rows(const GroupedGemmParams& p, int64_t begin, Product* product) {
  product->a = p.a;
  product->out = p.out;
  if (p.gamma) product->gamma = p.gamma + begin;
  if (p.gather) {
    product->a_row = p.gather + begin;
  } else {
    product->a_row_begin = begin;
  }
  if (p.scatter) {
    product->out_row = p.scatter + begin;
  } else {
    product->out_row_begin = begin;
  }
}

}  // namespace

void gemm(const GemmParams& p) {
  Product product;
  product.a = p.a;
  product.b = p.b;
  product.m = p.m;
  product.n = p.n;
  product.k = product.k_total = p.k;
  product.alpha = p.alpha.value;
  product.bias = p.bias;
  product.bias_type = p.bias_type;
  product.out = p.out;
  product.out_type = p.out_type;
  multiply({product}, p.a, p.b);
}

void grouped_gemm(const GroupedGemmParams& p) {
  check_groups(p);
  const int64_t out_bytes = bytes_of(p.out_type);
  if (!p.ragged_k && !p.rows_not_zeroed) {
    std::memset(p.out, 0, static_cast<size_t>(p.m * p.n * out_bytes));
  }
  std::vector<Product> products;
  for (int64_t e = 0; e < p.groups; ++e) {
    const int64_t begin = e ? p.offs[e - 1] : 0, size = p.offs[e] - begin;
    Product product;
    product.n = p.n;
    product.k_total = p.k;
    product.alpha = p.group_alpha ? p.group_alpha[e] : p.alpha.value;
    if (p.bias) product.bias = advance(p.bias, e * p.n * bytes_of(p.bias_type));
    product.bias_type = p.bias_type;
    product.out_type = p.out_type;
    product.gamma = p.gamma;
    if (p.ragged_k) {
      product.a = p.a;
      product.b = p.b;
      product.m = p.m;
      product.k_begin = begin;
      product.k = size;
      if (p.stale_padding) {
        constexpr int64_t kScaleTile = kTileCols * kBlockSize;
        product.k = std::min(round_up(p.offs[e], kScaleTile), p.k) - begin;
      }
      product.out = const_cast<char*>(advance(p.out, e * p.m * p.n * out_bytes));
    } else {
      if (size == 0) continue;
      product.b = operand_of_group(p.b, e, p.n, p.k);
      product.m = size;
      product.k = p.k;
      set_rows(p, begin, &product);
    }
    products.push_back(product);
  }
  multiply(products, p.a, p.b);
}

}  // namespace nvfp4::cpu
