// Off the packed format on a GPU: dequantize, the scale layouts, and a GEMM's epilogue.
//
//   out = T(fl32(e2m1 * block_scale * g))        the first product is exact
//   out = T(fma(alpha, acc, bias))               epilogue
//
// NaN results have the canonical bytes of nvfp4.h.
#include "common.cuh"
#include "decode.cuh"
#include "hopper.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxGrid = 1 << 16;  // the kernels stride over the rest

// ------------------------------------------------------------------------------------ dequantize

constexpr int kLaneElements = 8;  // one 32-bit word of codes
constexpr int kChunkElements = kWarpSize * kLaneElements;
constexpr int kChunks = 4;  // loads in flight
constexpr int kStepElements = kChunks * kChunkElements;
constexpr int kChunkBlocks = kChunkElements / kBlockSize;

using DequantizeSide = DequantizePairParams::Side;

struct DequantizeArgs {
  DequantizeSide side, other;  // `other` has rows in a pair only
  int64_t k;
  int64_t cols;           // scales a row
  int64_t tiles_per_row;  // 0: row-major scales
  int64_t steps_per_row;
  Scalar global_scale;
};

// e2m1 * s, times 2^-7 as decode8 has it, in FP32.
__device__ __forceinline__ void decode8_to_float(uint32_t word, float s, float (&v)[8]) {
  uint32_t pairs[4];
  // One multiply in FP32 in place of decode8's two: bits of e2m1 * 2^-126, times s * 2^119.
  spread_pairs(word, pairs);
  const float scale = s * 0x1p119f;
  for (int i = 0; i < 4; ++i) {
    float low, high;
    widen_pair(place_pair(pairs[i], __nv_bfloat16{}), low, high, __nv_bfloat16{});
    v[2 * i] = low * scale;
    v[2 * i + 1] = high * scale;
  }
}

__device__ __forceinline__ void store16(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  *static_cast<uint4*>(p) = make_uint4(x, y, z, w);
}

// Eight values without NaN, as T. kAligned: `out` is 16-byte aligned.
template <typename T, bool kAligned>
__device__ __forceinline__ void store8(T* out, const float (&v)[8]) {
  if constexpr (!kAligned) {
    for (int i = 0; i < 8; ++i) out[i] = from_float<T>(v[i]);
  } else if constexpr (sizeof(T) == 4) {
    for (int i = 0; i < 8; i += 4) {
      store16(out + i, __float_as_uint(v[i]), __float_as_uint(v[i + 1]), __float_as_uint(v[i + 2]),
              __float_as_uint(v[i + 3]));
    }
  } else {
    store16(out, round_pair<T>(v[0], v[1]), round_pair<T>(v[2], v[3]), round_pair<T>(v[4], v[5]),
            round_pair<T>(v[6], v[7]));
  }
}

// kUnitScale: the host knows that g is 1.
template <typename T, bool kAligned, bool kUnitScale>
__device__ __forceinline__ void dequantize8(uint32_t word, uint32_t code, float g, bool g_finite,
                                            T* out) {
  const bool nan = (code & 0x7Fu) == kE4m3Nan;
  const float s = e4m3_decode(static_cast<uint8_t>(code));
  if (nan || !g_finite) {
    for (int i = 0; i < 8; ++i) {
      const float exact = e2m1_to_float((word >> (4 * i)) & 0xFu) * e4m3_to_float(code);
      out[i] = from_float<T>(exact * g);
    }
  } else if constexpr (kUnitScale && kAligned && sizeof(T) == 2) {
    uint32_t pairs[4];
    decode8<T>(word, scale_pair(s, T{}), pairs);
    const uint32_t unit = round_pair<T>(1.0f / kDecodedUnit, 1.0f / kDecodedUnit);
    for (int i = 0; i < 4; ++i) pairs[i] = multiply_pair(pairs[i], unit, T{});
    store16(out, pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
    float v[8];
    decode8_to_float(word, s, v);
    for (int i = 0; i < 8; ++i) v[i] = (v[i] * (1.0f / kDecodedUnit)) * g;
    store8<T, kAligned>(out, v);
  }
}

template <typename T, bool kAligned, bool kUnitScale, bool kPair>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeArgs a) {
  wait_for_kernel_ahead();
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const float g = kUnitScale ? 1.0f : load_scalar(a.global_scale);
  const bool g_finite = is_finite(g);
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  const int64_t steps = (a.side.rows + (kPair ? a.other.rows : 0)) * a.steps_per_row;
  for (int64_t step = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; step < steps;
       step += warps) {
    int64_t local_row = step / a.steps_per_row;
    const int64_t segment = step - local_row * a.steps_per_row;
    const bool other = kPair && local_row >= a.side.rows;
    if (other) local_row -= a.side.rows;
    // Field by field: a choice of structures would go through memory.
    const DequantizeSide side = {
        other ? a.other.data : a.side.data, other ? a.other.block_scale : a.side.block_scale,
        other ? a.other.row_begin : a.side.row_begin, 0, other ? a.other.out : a.side.out};
    const int64_t row = side.row_begin + local_row;
    const int64_t element = segment * kStepElements + lane * kLaneElements;
    const int64_t column = element / kBlockSize;
    const uint8_t* data = side.data + row * (a.k / 2) + element / 2;
    const uint8_t* scale;
    int64_t scale_step;  // from one chunk's scale to the next
    if (a.tiles_per_row > 0) {
      scale = side.block_scale + swizzled_offset(row, column, a.tiles_per_row);
      scale_step = kChunkBlocks / kTileCols * kTileBytes;
    } else {
      scale = side.block_scale + row * a.cols + column;
      scale_step = kChunkBlocks;
    }
    uint32_t words[kChunks], codes[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      words[c] = codes[c] = 0;
      if (element + c * kChunkElements >= a.k) continue;
      const uint8_t* p = data + c * (kChunkElements / 2);
      if constexpr (kAligned) {
        words[c] = __ldg(reinterpret_cast<const uint32_t*>(p));
      } else {
        words[c] = p[0] | p[1] << 8 | p[2] << 16 | uint32_t{p[3]} << 24;
      }
      codes[c] = __ldg(scale + c * scale_step);
    }
    T* out = static_cast<T*>(side.out) + local_row * a.k + element;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (element + c * kChunkElements >= a.k) continue;
      dequantize8<T, kAligned, kUnitScale>(words[c], codes[c], g, g_finite,
                                           out + c * kChunkElements);
    }
  }
}

// Up to here a launch that is spared is worth more than the choice of a side in every step costs:
// with 77 million elements a call of 110 us took 5 us more.
constexpr int64_t kMostPairElements = int64_t{1} << 24;

using DequantizeKernel = void (*)(const DequantizeArgs);

void launch_dequantize(const DequantizeArgs& a, DequantizeKernel kernel, Stream stream) {
  const int64_t needed = ceil_div((a.side.rows + a.other.rows) * a.steps_per_row, kWarps);
  if (needed == 0) return;
  launch_behind("dequantize", kernel,
                dim3(static_cast<unsigned>(std::min<int64_t>(needed, kMaxGrid))), kThreads, stream,
                a);
}

template <typename T, bool kPair>
DequantizeKernel pick_kernel(bool aligned, bool unit) {
  if constexpr (!kPair) {
    if (!unit) {
      return aligned ? dequantize_kernel<T, true, false, kPair>
                     : dequantize_kernel<T, false, false, kPair>;
    }
  }
  return aligned ? dequantize_kernel<T, true, true, kPair>
                 : dequantize_kernel<T, false, true, kPair>;
}

bool aligned(const DequantizeSide& side) {
  return is_aligned(side.out, 16) && is_aligned(side.data, 4);
}

// --------------------------------------------------------------------------------- scale layouts

// A thread's share: the 32 bytes of rows r, r + 32, r + 64, r + 96 and the four after them each,
// in one tile. It reads (or writes) one word of each of those eight rows.
constexpr int kTileParts = 16;
constexpr int kPartWords = kTileBytes / kTileParts / 4;

// Row within the tile of word w of part p.
__device__ __forceinline__ int part_row(int part, int w) {
  return 2 * part + w / (kTileRows / 32) + 32 * (w % (kTileRows / 32));
}

template <bool kSwizzle, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    scale_layout_kernel(const uint8_t* in, uint8_t* out, int64_t rows, int64_t cols,
                        int64_t tiles_per_row, int64_t parts) {
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < parts;
       index += threads) {
    const int64_t row_part = index / tiles_per_row;
    const int64_t tile_col = index - row_part * tiles_per_row;
    const int64_t tile_row = row_part / kTileParts;
    const int part = static_cast<int>(row_part % kTileParts);
    const int64_t tile = (tile_row * tiles_per_row + tile_col) * kTileBytes + part * 4 * kPartWords;
    const int64_t col = tile_col * kTileCols;
    const uint8_t* source = kSwizzle ? in : in + tile;
#pragma unroll
    for (int w = 0; w < kPartWords; ++w) {
      const int64_t row = tile_row * kTileRows + part_row(part, w);
      const int64_t linear = row * cols + col;
      if constexpr (kAligned) {  // and cols is a multiple of kTileCols
        if constexpr (kSwizzle) {
          const uint32_t word =
              row < rows ? *reinterpret_cast<const uint32_t*>(source + linear) : 0;
          *reinterpret_cast<uint32_t*>(out + tile + 4 * w) = word;
        } else if (row < rows) {
          *reinterpret_cast<uint32_t*>(out + linear) =
              *reinterpret_cast<const uint32_t*>(source + 4 * w);
        }
      } else {
        for (int c = 0; c < kTileCols; ++c) {
          const bool inside = row < rows && col + c < cols;
          if constexpr (kSwizzle) {
            out[tile + 4 * w + c] = inside ? source[linear + c] : 0;
          } else if (inside) {
            out[linear + c] = source[4 * w + c];
          }
        }
      }
    }
  }
}

template <bool kSwizzle>
void launch_scale_layout(const SwizzleParams& p, Stream stream) {
  const int64_t tile_rows = ceil_div(p.rows, kTileRows);
  const int64_t tiles_per_row = ceil_div(p.cols, kTileCols);
  const int64_t parts = tile_rows * tiles_per_row * kTileParts;
  if (parts == 0) return;
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(ceil_div(parts, kThreads), kMaxGrid)));
  const bool aligned = p.cols % kTileCols == 0 && is_aligned(p.in, 4) && is_aligned(p.out, 4);
  launch(kSwizzle ? "swizzle_scales" : "unswizzle_scales",
         aligned ? scale_layout_kernel<kSwizzle, true> : scale_layout_kernel<kSwizzle, false>, grid,
         kThreads, stream, p.in, p.out, p.rows, p.cols, tiles_per_row, parts);
}

// -------------------------------------------------------------------------------------- epilogue

constexpr int kEpilogueColumns = 4;  // a thread's

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) epilogue_kernel(const EpilogueParams p) {
  wait_for_kernel_ahead();
  const int64_t column = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kEpilogueColumns;
  if (column >= p.n) return;
  const float alpha = load_scalar(p.alpha);
  float bias[kEpilogueColumns] = {};
  for (int i = 0; i < kEpilogueColumns; ++i) {
    if (p.bias && column + i < p.n) bias[i] = load_as_float(p.bias, p.bias_type, column + i);
  }
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const float* acc = p.acc + row * p.n + column;
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride + column;
    if constexpr (kAligned) {  // and n is a multiple of kEpilogueColumns
      const float4 v = __ldcs(reinterpret_cast<const float4*>(acc));
      const T r[4] = {
          from_float<T>(fma_rn(alpha, v.x, bias[0])), from_float<T>(fma_rn(alpha, v.y, bias[1])),
          from_float<T>(fma_rn(alpha, v.z, bias[2])), from_float<T>(fma_rn(alpha, v.w, bias[3]))};
      if constexpr (sizeof(T) == 4) {
        *reinterpret_cast<float4*>(out) = make_float4(r[0], r[1], r[2], r[3]);
      } else {
        uint32_t low, high;
        memcpy(&low, r, 4);
        memcpy(&high, r + 2, 4);
        *reinterpret_cast<uint2*>(out) = make_uint2(low, high);
      }
    } else {
      for (int i = 0; i < kEpilogueColumns && column + i < p.n; ++i) {
        out[i] = from_float<T>(fma_rn(alpha, acc[i], bias[i]));
      }
    }
  }
}

template <typename T>
void launch_epilogue(const EpilogueParams& p, Stream stream) {
  const bool aligned = p.n % kEpilogueColumns == 0 && is_aligned(p.acc, 16) &&
                       is_aligned(p.out, 4 * sizeof(T)) && p.out_row_stride % kEpilogueColumns == 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(p.n, kThreads * kEpilogueColumns)),
                  static_cast<unsigned>(std::min<int64_t>(p.rows, 4096)));
  launch_behind("epilogue", aligned ? epilogue_kernel<T, true> : epilogue_kernel<T, false>, grid,
                kThreads, stream, p);
}

}  // namespace

void dequantize(const DequantizeParams& p, Stream stream) {
  DequantizeArgs a = {};
  a.side = {p.data, p.block_scale, p.row_begin, p.rows, p.out};
  a.k = p.k;
  a.cols = p.k / kBlockSize;
  a.tiles_per_row = p.swizzled ? ceil_div(a.cols, kTileCols) : 0;
  a.steps_per_row = ceil_div(p.k, kStepElements);
  a.global_scale = p.global_scale;
  const bool unit = p.global_scale.device == nullptr && p.global_scale.value == 1.0f;
  dispatch(p.out_type, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch_dequantize(a, pick_kernel<T, false>(aligned(a.side), unit), stream);
  });
}

void dequantize_pair(const DequantizePairParams& p, Stream stream) {
  DequantizeArgs a = {};
  a.k = p.k;
  a.cols = p.k / kBlockSize;
  a.tiles_per_row = ceil_div(a.cols, kTileCols);
  a.steps_per_row = ceil_div(p.k, kStepElements);
  const auto run = [&](const DequantizeSide& side, const DequantizeSide& other, auto pair) {
    a.side = side;
    a.other = other;
    const bool both = aligned(side) && aligned(other);
    launch_dequantize(a,
                      p.out_type == DType::kFloat16
                          ? pick_kernel<__half, decltype(pair)::value>(both, true)
                          : pick_kernel<__nv_bfloat16, decltype(pair)::value>(both, true),
                      stream);
  };
  const bool small = (p.a.rows + p.b.rows) * p.k <= kMostPairElements;
  if (p.a.rows > 0 && p.b.rows > 0 && small) return run(p.a, p.b, std::true_type{});
  for (const DequantizeSide& side : {p.b, p.a}) run(side, {}, std::false_type{});
}

void swizzle_scales(const SwizzleParams& p, Stream stream) { launch_scale_layout<true>(p, stream); }

void unswizzle_scales(const SwizzleParams& p, Stream stream) {
  launch_scale_layout<false>(p, stream);
}

void epilogue(const EpilogueParams& p, Stream stream) {
  if (p.rows == 0 || p.n == 0) return;
  dispatch(p.out_type,
           [&](auto* type) { launch_epilogue<std::remove_pointer_t<decltype(type)>>(p, stream); });
}

}  // namespace nvfp4::cuda
