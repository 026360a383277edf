// The producers on a GPU: quantize and swiglu_quantize.
//
//   s = e4m3_rn((amax / 6) / g),  code = e2m1_rn(x / (s g))     bytes equal to the CPU's
//   x = silu(gate) * up in FP32, rounded nowhere before          (swiglu_quantize)
//
// One thread takes a whole block of 16, so that no lane waits for another; a warp takes 32
// neighbouring blocks of a row, then the same columns of the rows below, which only adds constants
// to its pointers. A block's 32 bytes (of 16-bit elements) are two loads that each touch every
// sector of the warp's kilobyte, so the lines have to stay in L1 between the two.
//
// Enough warps fit an SM to hide the memory's latency without loading ahead. Padding, of rows as of
// data, is written by thread blocks of its own: it neither waits for an input nor is waited for.
//
// A warp that meets anything unusual (a NaN, a huge element, an unusable g) redoes its blocks with
// nvfp4.h's own functions.
#include "block_math.h"
#include "common.cuh"
#include "hopper.cuh"
#include "swiglu.cuh"

namespace nvfp4::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kSegmentElements = kWarpSize * kBlockSize;  // of a row, a warp's
// Rows a task: a power of two that divides the 32 of a tile's quarter, so that it stays in one.
constexpr int64_t kMostTaskRows = 16;
constexpr int64_t kTaskWaves = 2;  // fewer rows a task where there would be fewer tasks than this
constexpr int64_t kMostPaddingBlocks = 64;
// Thread blocks an SM: what the registers leave room for.
template <typename T, bool kSwiglu>
constexpr int kResidentBlocks = kSwiglu ? (sizeof(T) == 4 ? 6 : 8) : (sizeof(T) == 4 ? 8 : 10);

struct QuantizeArgs {
  const void* x;
  int64_t x_row_stride;
  uint32_t rows, padded_rows, scale_rows;
  uint32_t k;
  uint32_t cols, scale_cols;  // scales a row: of data, and in memory
  uint32_t segments;          // warps a row
  uint32_t tasks, task_rows;  // a task is a warp's: up to task_rows rows of one segment
  uint32_t task_blocks;       // thread blocks of tasks; those after them write padding
  Scalar global_scale;
  uint8_t* data;
  uint8_t* block_scale;
  bool swizzled;
};

// A block's elements as loaded; for SwiGLU of gate and of up.
template <typename T, bool kSwiglu>
struct Input {
  Raw8<T> x[2];
  Raw8<T> up[kSwiglu ? 2 : 1];
};

template <bool kAligned, typename T>
__device__ __forceinline__ void load_block(const T* p, Raw8<T> (&raw)[2]) {
  for (int h = 0; h < 2; ++h) {
    if constexpr (kAligned) {
      for (int i = 0; i < Raw8<T>::kWords; ++i) {
        raw[h].word[i] = load_cached(reinterpret_cast<const uint4*>(p + 8 * h) + i);
      }
    } else {
      raw[h] = load8<false>(p + 8 * h);
    }
  }
}

template <typename T, bool kSwiglu, bool kAligned>
__device__ __forceinline__ Input<T, kSwiglu> load_input(const QuantizeArgs& a, const T* p) {
  Input<T, kSwiglu> in;
  load_block<kAligned>(p, in.x);
  if constexpr (kSwiglu) load_block<kAligned>(p + a.k, in.up);
  return in;
}

using BlockValues = Values<kBlockSize>;

template <typename T>
__device__ __forceinline__ BlockValues widen_block(const Raw8<T> (&raw)[2]) {
  BlockValues values;
  for (int h = 0; h < 2; ++h) {
    float v[8];
    widen(raw[h], v);
    for (int i = 0; i < 8; ++i) values.v[8 * h + i] = v[i];
  }
  return values;
}

// The largest magnitude; NaN where an element is NaN.
__device__ __forceinline__ float abs_max16(const BlockValues& values) {
  float m[4];
  for (int i = 0; i < 4; ++i) m[i] = max_nan(fabsf(values.v[i]), fabsf(values.v[i + 4]));
  for (int i = 8; i < kBlockSize; ++i) m[i % 4] = max_nan(m[i % 4], fabsf(values.v[i]));
  return max_nan(max_nan(m[0], m[1]), max_nan(m[2], m[3]));
}

// The elements to quantize, and their largest magnitude (NaN where one is NaN).
template <typename T, bool kSwiglu>
__device__ __forceinline__ BlockValues widen_input(const Input<T, kSwiglu>& in, float& amax) {
  BlockValues values = widen_block(in.x);
  if constexpr (kSwiglu) {
    const BlockValues up = widen_block(in.up);
    if (__all_sync(kFullWarp, is_fast_silu(in.x[0], in.x[1]))) {
      for (int i = 0; i < kBlockSize; ++i) {
        values.v[i] = fast_swiglu<T>(values.v[i], up.v[i]);
      }
    } else {
      values = plain_swiglu(values, up);
    }
    amax = abs_max16(values);
  } else {
    amax = raw_abs_max(in.x[0], in.x[1]);
  }
  return values;
}

struct Encoded {
  uint32_t codes[2];
  uint32_t scale;
};

__device__ __noinline__ Encoded encode_plain(const BlockValues values, float g) {
  float all = 0.0f, amax = 0.0f;  // of the finite elements
  for (int i = 0; i < kBlockSize; ++i) {
    all = max_nan(all, fabsf(values.v[i]));
    if (is_finite(values.v[i])) amax = fmaxf(amax, fabsf(values.v[i]));
  }
  const BlockScale s = make_block_scale(amax, is_finite(all), g);
  Encoded e{{0, 0}, s.code};
  for (int i = 0; i < kBlockSize; ++i) {
    const uint32_t code = quantize_element(values.v[i], s.divisor);
    e.codes[i / 8] |= code << (4 * (i % 8));
  }
  return e;
}

__device__ __forceinline__ Encoded encode(const BlockValues& values, float amax,
                                          const GlobalScale& g) {
  const FastBlockScale s = fast_block_scale(amax, g);
  if (!__all_sync(kFullWarp, s.fast)) return encode_plain(values, g.g);
  const bool clamp = !NVFP4_HARDWARE_E2M1 && __any_sync(kFullWarp, s.clamp);
  Encoded e;
  e.scale = s.code;
  for (int h = 0; h < 2; ++h) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = quotient(values.v[8 * h + i], s.divisor, s.reciprocal);
    e.codes[h] = encode8(t, clamp);
  }
  return e;
}

template <bool kAligned>
__device__ __forceinline__ void store_codes(uint8_t* p, uint32_t first, uint32_t second) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(p) = make_uint2(first, second);
  } else {
    for (int i = 0; i < 4; ++i) {
      p[i] = static_cast<uint8_t>(first >> (8 * i));
      p[4 + i] = static_cast<uint8_t>(second >> (8 * i));
    }
  }
}

// Codes and scales of the rows that x does not have, 0x00 whatever g is; thread `first` of `step`.
template <bool kAligned>
__device__ __forceinline__ void write_padding(const QuantizeArgs& a, uint32_t first,
                                              uint32_t step) {
  const uint64_t data_blocks = uint64_t{a.padded_rows} * a.cols;
  for (uint64_t i = uint64_t{a.rows} * a.cols + first; i < data_blocks; i += step) {
    store_codes<kAligned>(a.data + i * kBlockBytes, 0, 0);
    if (!a.swizzled) a.block_scale[i] = 0;
  }
  if (!a.swizzled) return;
  // Sixteen bytes of a tile are four columns of rows r, r + 32, r + 64 and r + 96.
  const uint32_t tiles = a.scale_cols / kTileCols;
  const uint32_t begin = a.rows / kTileRows, end = a.scale_rows / kTileRows;
  for (uint32_t tile_row = begin; tile_row < end; ++tile_row) {
    for (uint32_t i = first; i < tiles * 32; i += step) {
      uint8_t* p = a.block_scale + (uint64_t{tile_row} * tiles * 32 + i) * 16;
      const uint32_t row = tile_row * kTileRows + i % 32;
      if (kAligned && row >= a.rows) {
        *reinterpret_cast<uint4*>(p) = make_uint4(0, 0, 0, 0);
        continue;
      }
      for (int quarter = 0; quarter < 4; ++quarter) {
        if (row + 32 * quarter < a.rows) continue;
        if constexpr (kAligned) {
          *reinterpret_cast<uint32_t*>(p + 4 * quarter) = 0;
        } else {
          for (int j = 0; j < 4; ++j) p[4 * quarter + j] = 0;
        }
      }
    }
  }
}

template <typename T, bool kSwiglu, bool kAligned>
__global__ void __launch_bounds__(kThreads, kResidentBlocks<T, kSwiglu>)
    quantize_kernel(const QuantizeArgs a) {
  wait_for_kernel_ahead();
  if (blockIdx.x >= a.task_blocks) {
    write_padding<kAligned>(a, (blockIdx.x - a.task_blocks) * kThreads + threadIdx.x,
                            (gridDim.x - a.task_blocks) * kThreads);
    return;
  }
  const uint32_t task = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (task >= a.tasks) return;
  const uint32_t group = task / a.segments;
  const uint32_t row = group * a.task_rows;
  uint32_t left = min(a.task_rows, a.rows - row);  // rows to go
  const uint32_t column = (task - group * a.segments) * kWarpSize + threadIdx.x % kWarpSize;
  const bool valid = column < a.cols;
  const bool stores_scale = column < a.scale_cols;  // padding columns: 0x00 whatever g is

  // A lane past the row's end reads what the first lane of the row does; its codes go nowhere.
  const T* x = static_cast<const T*>(a.x) + row * a.x_row_stride +
               (valid ? column : 0) * uint32_t{kBlockSize};
  uint8_t* data = a.data + (uint64_t{row} * a.cols + column) * kBlockBytes;
  uint8_t* scale = a.block_scale;
  uint32_t scale_step;
  if (a.swizzled) {
    // swizzled_offset, in the 32 bits that a row's part of it needs. A task's rows lie in one
    // quarter of a tile: each is 16 bytes after the one before.
    scale += uint64_t{row / kTileRows} * (a.scale_cols * kTileRows) +
             column / kTileCols * kTileBytes + (row % 32) * 16 + row % kTileRows / 32 * 4 +
             column % kTileCols;
    scale_step = 16;
  } else {
    scale += uint64_t{row} * a.cols + column;
    scale_step = a.cols;
  }

  auto in = load_input<T, kSwiglu, kAligned>(a, x);
  const GlobalScale g = prepare_global_scale(load_scalar(a.global_scale));
  while (true) {
    float amax;
    const BlockValues values = widen_input(in, amax);
    const Encoded e = encode(values, amax, g);
    if (valid) store_codes<kAligned>(data, e.codes[0], e.codes[1]);
    if (stores_scale) *scale = static_cast<uint8_t>(valid ? e.scale : 0);
    if (--left == 0) return;
    x += a.x_row_stride;
    data += a.k / 2;
    scale += scale_step;
    in = load_input<T, kSwiglu, kAligned>(a, x);
  }
}

template <typename T, bool kSwiglu>
void launch_quantize(const QuantizeParams& p, Stream stream) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t scale_rows = p.swizzled ? round_up(p.padded_rows, kTileRows) : p.padded_rows;
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
  a.segments = static_cast<uint32_t>(ceil_div(p.k, kSegmentElements));
  a.global_scale = p.global_scale;
  a.data = p.data;
  a.block_scale = p.block_scale;
  a.swizzled = p.swizzled;
  const bool aligned = is_aligned(p.x, 16) && p.x_row_stride * sizeof(T) % 16 == 0 &&
                       is_aligned(p.data, 8) && is_aligned(p.block_scale, 16);

  // Long tasks, but enough of them to go round.
  const int64_t resident =
      int64_t{current_device().sm_count} * kResidentBlocks<T, kSwiglu> * kWarps;
  int64_t task_rows = kMostTaskRows;
  while (task_rows > 1 && ceil_div(p.rows, task_rows) * a.segments < kTaskWaves * resident) {
    task_rows /= 2;
  }
  const int64_t tasks = ceil_div(p.rows, task_rows) * a.segments;
  const int64_t task_blocks = ceil_div(tasks, kWarps);
  if (tasks > kMost) throw std::runtime_error("quantize: more than 2^31 tasks");
  a.tasks = static_cast<uint32_t>(tasks);
  a.task_rows = static_cast<uint32_t>(task_rows);
  a.task_blocks = static_cast<uint32_t>(task_blocks);
  // About one store a thread.
  const int64_t padding = (p.padded_rows - p.rows) * a.cols +
                          (p.swizzled && scale_rows > p.rows ? 32 * (a.scale_cols / kTileCols) : 0);
  const int64_t padding_blocks = std::min(ceil_div(padding, kThreads), kMostPaddingBlocks);
  launch_behind(kSwiglu ? "swiglu_quantize" : "quantize",
                aligned ? quantize_kernel<T, kSwiglu, true> : quantize_kernel<T, kSwiglu, false>,
                dim3(static_cast<unsigned>(task_blocks + padding_blocks)), kThreads, stream, a);
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
