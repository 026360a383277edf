// The producers on a GPU: quantize, swiglu_quantize, and the dynamic global scale.
//
//   s = e4m3_rn((amax / 6) / g),  code = e2m1_rn(x / (s g))     bytes equal to the CPU's
//   x = silu(gate) * up in FP32, rounded nowhere before          (swiglu_quantize)
//
// One warp takes 512 consecutive elements of a row at a time: lane l loads elements 8 l .. 8 l + 7
// of each half, so that every load is a full line. Two neighbouring lanes thus hold block l / 2 of
// the first half and block l / 2 of the second; the even one works out the first block's scale,
// the odd one the second's, and they swap. A warp stays at its columns and strides over the rows;
// the next row's elements are loaded before this row's are used.
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
// Blocks an SM: as many as the registers of a loop with its next loads under way leave room for.
template <typename T, bool kSwiglu>
constexpr int kResidentBlocks = (sizeof(T) == 4 ? 3 : 4) - kSwiglu;
static_assert(kHalfBlocks % kTileCols == 0, "a scale word never crosses the halves");

struct QuantizeArgs {
  const void* x;
  int64_t x_row_stride;
  uint32_t rows, padded_rows, scale_rows;
  uint32_t k;
  uint32_t cols, scale_cols;  // scales a row: of data, and in memory
  uint32_t segments;          // warp steps a row
  uint32_t row_step;          // rows between a warp's steps
  Scalar global_scale;
  uint8_t* data;
  uint8_t* block_scale;
  bool swizzled;
};

// A lane's fixed place in a row, for all the rows its warp takes.
struct Place {
  uint32_t element;    // first of its eight in the first half
  bool valid[2];       // whether the row has the eight, in each half
  // Where it has not, the lane reads some that the row has, and their codes go nowhere.
  uint32_t read;       // what it reads as the first half's eight
  uint32_t half_step;  // from there to what it reads as the second half's
  uint32_t column;     // of the block whose scale it works out
  bool column_valid;   // that block exists
  uint32_t word_byte;  // which byte of a scale word it is
  bool stores_scale;   // it writes a word (swizzled) or its byte (row-major)

  __device__ Place(const QuantizeArgs& a, uint32_t segment, int lane)
      : element(segment * (2 * kHalfElements) + lane * kLaneElements),
        valid{element < a.k, element + kHalfElements < a.k},
        read(valid[0] ? element : 0),
        half_step(valid[1] ? kHalfElements : 0),
        column(segment * kSegmentBlocks + (lane & 1) * kHalfBlocks + lane / 2),
        column_valid(column < a.cols),
        word_byte((lane >> 1) % kTileCols),
        stores_scale(column < a.scale_cols && (!a.swizzled || word_byte == 0)) {}
};

// What a lane loads in a step: eight elements of both halves; for SwiGLU of gate and of up.
template <typename T, bool kSwiglu>
struct Input {
  Raw8<T> x[2];
  Raw8<T> up[kSwiglu ? 2 : 1];
};

// `p` points at the lane's first element of the row that it may read.
template <typename T, bool kSwiglu, bool kAligned>
__device__ __forceinline__ Input<T, kSwiglu> load_input(const QuantizeArgs& a, const Place& place,
                                                        const T* p) {
  Input<T, kSwiglu> in;
  for (int h = 0; h < 2; ++h) {
    in.x[h] = load8<kAligned>(p + h * place.half_step);
    if constexpr (kSwiglu) in.up[h] = load8<kAligned>(p + a.k + h * place.half_step);
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
    const float gate_max = raw_abs_max(in.x[0], in.x[1]);
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
  if (!__all_sync(kFullWarp, mine.fast)) return encode_plain(values, g.g, odd);
  float d[2], r[2];  // of the pair's two blocks: the even lane's, the odd lane's
  for (int h = 0; h < 2; ++h) {
    d[h] = __shfl_sync(kFullWarp, mine.divisor, h, 2);
    r[h] = __shfl_sync(kFullWarp, mine.reciprocal, h, 2);
  }
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
__device__ __forceinline__ void store_word(uint8_t* p, uint32_t word) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint32_t*>(p) = word;
  } else {
    for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

// `data` points at the lane's first code of the row.
template <bool kAligned>
__device__ __forceinline__ void store_codes(const Place& place, uint8_t* data,
                                            const uint32_t (&codes)[2]) {
  for (int h = 0; h < 2; ++h) {
    if (place.valid[h]) store_word<kAligned>(data + h * (kHalfElements / 2), codes[h]);
  }
}

// The scales of one row: `mine` of every lane.
template <bool kAligned>
__device__ __forceinline__ void store_scales(const QuantizeArgs& a, const Place& place,
                                             uint32_t row, uint32_t mine) {
  if (!a.swizzled) {
    if (place.stores_scale) {
      a.block_scale[uint64_t{row} * a.scale_cols + place.column] = static_cast<uint8_t>(mine);
    }
    return;
  }
  // Four neighbouring blocks of a row make one word: lanes l, l + 2, l + 4, l + 6.
  uint32_t word = mine << (8 * place.word_byte);
  word |= __shfl_xor_sync(kFullWarp, word, 2);
  word |= __shfl_xor_sync(kFullWarp, word, 4);
  if (place.stores_scale) {
    // swizzled_offset, in the 32 bits that a row's part of it needs.
    const uint32_t in_tile = (row % 32) * 16 + row % kTileRows / 32 * 4;
    uint8_t* p = a.block_scale + place.column / kTileCols * kTileBytes + in_tile +
                 uint64_t{row / kTileRows} * (a.scale_cols * kTileRows);
    store_word<kAligned>(p, word);
  }
}

template <typename T, bool kSwiglu, bool kAligned>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<T, kSwiglu>)
    quantize_kernel(const QuantizeArgs a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const bool odd = lane & 1;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const uint32_t first_row = warp / a.segments;
  if (first_row >= a.row_step) return;  // the few warps that don't make a whole row of steps
  const Place place(a, warp - first_row * a.segments, lane);

  uint32_t row = first_row;
  const T* x = static_cast<const T*>(a.x) + row * a.x_row_stride + place.read;
  uint8_t* data = a.data + uint64_t{row} * (a.k / 2) + place.element / 2;
  const int64_t x_step = a.row_step * a.x_row_stride;
  const uint64_t data_step = uint64_t{a.row_step} * (a.k / 2);

  if (row < a.rows) {
    auto in = load_input<T, kSwiglu, kAligned>(a, place, x);
    const GlobalScale g = prepare_global_scale(load_scalar(a.global_scale));
    while (true) {
      const uint32_t next_row = row + a.row_step;
      if (next_row < a.rows) x += x_step;  // else the last row is read once more, for nothing
      const auto next = load_input<T, kSwiglu, kAligned>(a, place, x);
      Values values;
      float amax[2];
      widen_input(in, values.v, amax);
      const Encoded e = encode(values, amax, g, odd);
      store_codes<kAligned>(place, data, e.codes);
      // Padding is 0x00 whatever g is.
      store_scales<kAligned>(a, place, row, place.column_valid ? e.scale : 0);
      data += data_step;
      row = next_row;
      if (row >= a.rows) break;
      in = next;
    }
  }
  for (; row < a.scale_rows; row += a.row_step) {
    if (row < a.padded_rows) store_codes<kAligned>(place, data, {0, 0});
    store_scales<kAligned>(a, place, row, 0);
    data += data_step;
  }
}

template <typename T, bool kSwiglu>
void launch_quantize(const QuantizeParams& p, Stream stream) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t scale_rows =
      p.swizzled ? round_up(p.padded_rows, kTileRows) : p.padded_rows;
  if (scale_rows == 0 || p.k == 0) return;
  if (scale_rows > kMost || p.k > kMost / kTileRows) {
    throw std::runtime_error("quantize: at most 2^31 rows of 2^24 elements");
  }
  QuantizeArgs a;
  a.x = p.x;
  a.x_row_stride = p.x_row_stride;
  a.rows = static_cast<uint32_t>(p.rows);
  a.padded_rows = static_cast<uint32_t>(p.padded_rows);
  a.scale_rows = static_cast<uint32_t>(scale_rows);
  a.k = static_cast<uint32_t>(p.k);
  a.cols = a.k / kBlockSize;
  a.scale_cols = p.swizzled ? static_cast<uint32_t>(round_up(a.cols, kTileCols)) : a.cols;
  a.segments = static_cast<uint32_t>(ceil_div(a.scale_cols, kSegmentBlocks));
  a.global_scale = p.global_scale;
  a.data = p.data;
  a.block_scale = p.block_scale;
  a.swizzled = p.swizzled;
  const bool aligned = is_aligned(p.x, 16) && p.x_row_stride * sizeof(T) % 16 == 0 &&
                       is_aligned(p.data, 4) && is_aligned(p.block_scale, 4);
  // Whole rows of steps, at least one: as many as the GPU holds at a time.
  const int64_t warps = int64_t{current_device().sm_count} * kResidentBlocks<T, kSwiglu> * kWarps;
  a.row_step = static_cast<uint32_t>(
      std::min(scale_rows, std::max<int64_t>(1, warps / a.segments)));
  const dim3 grid(static_cast<unsigned>(ceil_div(int64_t{a.row_step} * a.segments, kWarps)));
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
