// The producers on a GPU: quantize, swiglu_quantize, and the dynamic global scale.
//
//   s = e4m3_rn((amax / 6) / g),  code = e2m1_rn(x / (s g))     bytes equal to the CPU's
//   x = silu(gate) * up in FP32, rounded nowhere before          (swiglu_quantize)
//
// One warp takes 512 consecutive elements of a row at a time: lane l loads elements 8 l .. 8 l + 7
// of each half, so that every load is a full line. Two neighbouring lanes thus hold block l / 2 of
// the first half and block l / 2 of the second; the even one works out the first block's scale,
// the odd one the second's, and they swap. The next 512 elements are loaded before these are used.
//
// Every scale byte of the padded extent is visited and written, padding as 0x00; a warp that meets
// anything unusual (a NaN, a huge or tiny scale) redoes its 512 elements with nvfp4.h's own
// functions.
#include "block_math.h"
#include "common.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLaneElements = 8;                            // of each half
constexpr int kHalfElements = kWarpSize * kLaneElements;    // 256
constexpr int kHalfBlocks = kHalfElements / kBlockSize;     // 16
constexpr int kSegmentBlocks = 2 * kHalfBlocks;             // scale columns of a warp's step
static_assert(kHalfBlocks % kTileCols == 0, "a scale word never crosses the halves");

struct QuantizeArgs {
  const void* x;
  int64_t x_row_stride, rows, padded_rows, scale_rows;
  int64_t k;
  int64_t cols, scale_cols;  // scales a row: of data, and in memory
  int64_t segments;          // warp steps a row
  int64_t tiles_per_row;
  Scalar global_scale;
  uint8_t* data;
  uint8_t* block_scale;
  bool swizzled;
};

// A warp's step: (row, segment), advanced by the number of warps in the grid without a division.
struct Step {
  int64_t row;
  int64_t segment;

  __device__ void advance(int64_t rows, int64_t segments, int64_t segments_per_row) {
    row += rows;
    segment += segments;
    if (segment >= segments_per_row) {
      segment -= segments_per_row;
      ++row;
    }
  }
};

// What a lane loads in a step: eight elements of both halves; for SwiGLU of gate and of up.
template <typename T, bool kSwiglu>
struct Input {
  Raw8<T> x[2];
  Raw8<T> up[kSwiglu ? 2 : 1];
};

template <typename T, bool kSwiglu, bool kAligned>
__device__ __forceinline__ Input<T, kSwiglu> load_input(const QuantizeArgs& a, const Step& step,
                                                        int lane) {
  Input<T, kSwiglu> in;
  const int64_t column = step.segment * (2 * kHalfElements) + lane * kLaneElements;
  const T* p = static_cast<const T*>(a.x) + step.row * a.x_row_stride + column;
  for (int h = 0; h < 2; ++h) {
    const bool valid = step.row < a.rows && column + h * kHalfElements < a.k;
    in.x[h] = valid ? load8<kAligned>(p + h * kHalfElements) : zero8<T>();
    if constexpr (kSwiglu) {
      in.up[h] = valid ? load8<kAligned>(p + a.k + h * kHalfElements) : zero8<T>();
    }
  }
  return in;
}

// Out of line: rarely called, and sixteen copies of it would crowd the loop.
__device__ __noinline__ float swiglu_plain(float gate, float up) { return swiglu(gate, up); }

// The elements to quantize, and the largest magnitude of each half's eight (NaN where one is NaN).
template <typename T, bool kSwiglu>
__device__ __forceinline__ void widen_input(const Input<T, kSwiglu>& in, float (&v)[2][8],
                                            float (&amax)[2]) {
  if constexpr (kSwiglu) {
    const float gate_max = max_nan(raw_abs_max(in.x[0]), raw_abs_max(in.x[1]));
    const bool fast = __all_sync(kFullWarp, gate_max <= kFastSiluMax);
    for (int h = 0; h < 2; ++h) {
      float up[8];
      widen(in.x[h], v[h]);
      widen(in.up[h], up);
      if (fast) {
        for (int i = 0; i < 8; ++i) v[h][i] = fast_silu<sizeof(T) == 2>(v[h][i]) * up[i];
      } else {
        for (int i = 0; i < 8; ++i) v[h][i] = swiglu_plain(v[h][i], up[i]);
      }
      amax[h] = abs_max8(v[h]);
    }
  } else {
    for (int h = 0; h < 2; ++h) {
      widen(in.x[h], v[h]);
      amax[h] = raw_abs_max(in.x[h]);
    }
  }
}

struct Values {
  float v[2][8];
};

struct Encoded {
  uint32_t codes[2];  // of this lane's eight elements of each half
  uint8_t scale;      // even lane: first half's block lane / 2; odd lane: the second half's
};

// `mine` of the block this lane answers for, from the lane pair's halves.
__device__ __forceinline__ float pair_max(float first, float second, bool odd) {
  const float sent = odd ? first : second;
  const float kept = odd ? second : first;
  return max_nan(kept, __shfl_xor_sync(kFullWarp, sent, 1));
}

template <bool kClamp>
__device__ __forceinline__ uint32_t encode_half(const float (&v)[8], float divisor,
                                                float reciprocal) {
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = quotient(v[i], divisor, reciprocal);
  return encode8<kClamp>(t);
}

// The plain form, for the whole warp. By value: an address taken would keep the elements of the
// fast path in local memory.
__device__ __noinline__ Encoded encode_plain(const Values values, float g, bool odd) {
  const float(&v)[2][8] = values.v;
  const float all[2] = {abs_max8(v[0]), abs_max8(v[1])};
  const float finite[2] = {finite_abs_max8(v[0]), finite_abs_max8(v[1])};
  const BlockScale mine = make_block_scale(pair_max(finite[0], finite[1], odd),
                                           is_finite(pair_max(all[0], all[1], odd)), g);
  const float theirs = __shfl_xor_sync(kFullWarp, mine.divisor, 1);
  Encoded e;
  e.scale = mine.code;
  for (int h = 0; h < 2; ++h) {
    const float divisor = (h == 1) == odd ? mine.divisor : theirs;
    e.codes[h] = 0;
    for (int i = 0; i < 8; ++i) {
      e.codes[h] |= static_cast<uint32_t>(quantize_element(v[h][i], divisor)) << (4 * i);
    }
  }
  return e;
}

__device__ __forceinline__ Encoded encode(const Values& values, const float (&amax)[2],
                                          const GlobalScale& g, bool odd) {
  const float(&v)[2][8] = values.v;
  const FastBlockScale mine = fast_block_scale(pair_max(amax[0], amax[1], odd), g);
  if (!__all_sync(kFullWarp, mine.fast && g.fast)) return encode_plain(values, g.g, odd);
  const float divisor = __shfl_xor_sync(kFullWarp, mine.divisor, 1);
  const float reciprocal = __shfl_xor_sync(kFullWarp, mine.reciprocal, 1);
  const float d[2] = {odd ? divisor : mine.divisor, odd ? mine.divisor : divisor};
  const float r[2] = {odd ? reciprocal : mine.reciprocal, odd ? mine.reciprocal : reciprocal};
  Encoded e;
  e.scale = mine.code;
  if (!NVFP4_HARDWARE_E2M1 && __any_sync(kFullWarp, mine.clamp)) {
    for (int h = 0; h < 2; ++h) e.codes[h] = encode_half<true>(v[h], d[h], r[h]);
  } else {
    for (int h = 0; h < 2; ++h) e.codes[h] = encode_half<false>(v[h], d[h], r[h]);
  }
  return e;
}

template <bool kAligned>
__device__ __forceinline__ void store(const QuantizeArgs& a, const Step& step, int lane, Encoded e) {
  const int64_t element = step.segment * (2 * kHalfElements) + lane * kLaneElements;
  if (step.row < a.padded_rows) {
    uint8_t* p = a.data + step.row * (a.k / 2) + element / 2;
    for (int h = 0; h < 2; ++h, p += kHalfElements / 2) {
      if (element + h * kHalfElements >= a.k) break;
      if constexpr (kAligned) {
        *reinterpret_cast<uint32_t*>(p) = e.codes[h];
      } else {
        for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(e.codes[h] >> (8 * i));
      }
    }
  }
  const int64_t column = step.segment * kSegmentBlocks + (lane & 1) * kHalfBlocks + lane / 2;
  // Padding is 0x00 whatever g is.
  uint32_t scale = step.row < a.rows && column < a.cols ? e.scale : 0;
  if (a.swizzled) {
    // Four neighbouring blocks of a row make one word: lanes l, l + 2, l + 4, l + 6.
    const int in_word = (lane >> 1) % kTileCols;
    scale <<= 8 * in_word;
    scale |= __shfl_xor_sync(kFullWarp, scale, 2);
    scale |= __shfl_xor_sync(kFullWarp, scale, 4);
    if (in_word == 0 && column < a.scale_cols) {
      uint8_t* p = a.block_scale + swizzled_offset(step.row, column, a.tiles_per_row);
      if constexpr (kAligned) {
        *reinterpret_cast<uint32_t*>(p) = scale;
      } else {
        for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(scale >> (8 * i));
      }
    }
  } else if (column < a.scale_cols) {
    a.block_scale[step.row * a.scale_cols + column] = static_cast<uint8_t>(scale);
  }
}

template <typename T, bool kSwiglu, bool kAligned>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 2 : 3)
    quantize_kernel(const QuantizeArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool odd = lane & 1;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  const int64_t row_step = warps / a.segments, segment_step = warps % a.segments;
  Step step{warp / a.segments, warp % a.segments};
  if (step.row >= a.scale_rows) return;
  auto in = load_input<T, kSwiglu, kAligned>(a, step, lane);
  const GlobalScale g = prepare_global_scale(load_scalar(a.global_scale));
  while (true) {
    Step next = step;
    next.advance(row_step, segment_step, a.segments);
    const auto next_in = load_input<T, kSwiglu, kAligned>(a, next, lane);
    Values values;
    float amax[2];
    widen_input(in, values.v, amax);
    store<kAligned>(a, step, lane, encode(values, amax, g, odd));
    if (next.row >= a.scale_rows) return;
    step = next;
    in = next_in;
  }
}

template <typename T, bool kSwiglu>
void launch_quantize(const QuantizeParams& p, Stream stream) {
  QuantizeArgs a;
  a.x = p.x;
  a.x_row_stride = p.x_row_stride;
  a.rows = p.rows;
  a.padded_rows = p.padded_rows;
  a.scale_rows = p.swizzled ? round_up(p.padded_rows, kTileRows) : p.padded_rows;
  a.k = p.k;
  a.cols = p.k / kBlockSize;
  a.scale_cols = p.swizzled ? round_up(a.cols, kTileCols) : a.cols;
  a.segments = ceil_div(a.scale_cols, kSegmentBlocks);
  a.tiles_per_row = a.scale_cols / kTileCols;
  a.global_scale = p.global_scale;
  a.data = p.data;
  a.block_scale = p.block_scale;
  a.swizzled = p.swizzled;
  if (a.scale_rows == 0 || a.segments == 0) return;
  const bool aligned = is_aligned(p.x, 16) && p.x_row_stride * sizeof(T) % 16 == 0 &&
                       is_aligned(p.data, 4) && is_aligned(p.block_scale, 4);
  const int64_t needed = ceil_div(a.scale_rows * a.segments, kWarps);
  const int resident = sizeof(T) == 4 ? 2 : 3;
  const dim3 grid(static_cast<unsigned>(
      std::min<int64_t>(needed, int64_t{current_device().sm_count} * resident)));
  launch(kSwiglu ? "swiglu_quantize" : "quantize",
         aligned ? quantize_kernel<T, kSwiglu, true> : quantize_kernel<T, kSwiglu, false>, grid,
         kThreads, stream, a);
}

}  // namespace

void quantize(const QuantizeParams& p, Stream stream) {
  dispatch(p.x_type, [&](auto* type) {
    launch_quantize<std::remove_pointer_t<decltype(type)>, false>(p, stream);
  });
}

void swiglu_quantize(const QuantizeParams& p, Stream stream) {
  dispatch(p.x_type, [&](auto* type) {
    launch_quantize<std::remove_pointer_t<decltype(type)>, true>(p, stream);
  });
}

}  // namespace nvfp4::cuda
