// What the ops call: every kernel on raw pointers, once for the CPU and once for CUDA.
//
// Nothing here knows torch: csrc/ops.cpp validates and allocates, these compute. A CUDA kernel is
// asynchronous on `stream`, allocates nothing, never synchronizes, and reports a failed launch by
// throwing std::runtime_error. Sizes and offsets are 64-bit throughout. rows == 0 is legal
// everywhere and launches nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvfp4 {

enum class DType { kFloat32, kBFloat16, kFloat16 };

// An FP32 scalar: `value` where the host knows it, else one element at `device` in device memory.
struct Scalar {
  const float* device = nullptr;
  float value = 1.0f;
};

// Block scales of `rows` x `k / kBlockSize`: row-major, or in the 128x4 layout of nvfp4.h.
struct QuantizeParams {
  const void* x = nullptr;  // (rows, k), or (rows, 2 k) = [gate | up] for swiglu_quantize
  DType x_type = DType::kBFloat16;
  int64_t x_row_stride = 0;  // elements; the last dimension is contiguous
  int64_t rows = 0;
  int64_t padded_rows = 0;  // >= rows: rows beyond `rows` get code 0 and scale 0x00
  int64_t k = 0;            // a multiple of kBlockSize
  Scalar global_scale;
  uint8_t* data = nullptr;         // (padded_rows, k / 2)
  uint8_t* block_scale = nullptr;  // see `swizzled`; every byte is written, padding included
  bool swizzled = true;            // 128x4 layout, else row-major (padded_rows, k / kBlockSize)
};

struct DequantizeParams {
  const uint8_t* data = nullptr;         // (rows, k / 2), contiguous
  const uint8_t* block_scale = nullptr;  // of the whole tensor, whichever rows are decoded
  bool swizzled = true;
  int64_t row_begin = 0;  // decode rows [row_begin, row_begin + rows); data points at row 0
  int64_t rows = 0;
  int64_t k = 0;
  Scalar global_scale;  // FP32 product with the exact value, then one rounding to out
  void* out = nullptr;  // (rows, k) contiguous, its first row is row_begin
  DType out_type = DType::kFloat32;
};

struct SwizzleParams {
  const uint8_t* in = nullptr;
  uint8_t* out = nullptr;  // swizzle: every padding byte is written 0x00
  int64_t rows = 0;
  int64_t cols = 0;  // scales a row, k / kBlockSize
};

// D (m, n) = out(alpha * A (m, k) . B (n, k)^T + bias)
struct GemmParams {
  // A: packed NVFP4 with 128x4 scales, or dense where a_scale is null.
  const void* a = nullptr;
  const uint8_t* a_scale = nullptr;
  DType a_type = DType::kBFloat16;  // of a dense A
  int64_t a_row_stride = 0;         // elements of a dense A
  int64_t a_row_begin = 0;          // multiply rows [a_row_begin, a_row_begin + m) (CUDA only)
  const uint8_t* b = nullptr;       // packed NVFP4 (n, k / 2)
  const uint8_t* b_scale = nullptr;
  int64_t m = 0, n = 0, k = 0;
  Scalar alpha;
  const void* bias = nullptr;  // (n,) or null
  DType bias_type = DType::kFloat32;
  void* out = nullptr;  // (m, n) contiguous
  DType out_type = DType::kBFloat16;
};

// out (rows, n) = out(alpha * acc + bias): what a GEMM that can't apply them itself leaves over.
struct EpilogueParams {
  const float* acc = nullptr;  // (rows, n)
  int64_t rows = 0, n = 0;
  Scalar alpha;
  const void* bias = nullptr;
  DType bias_type = DType::kFloat32;
  void* out = nullptr;  // rows `out_row_stride` elements apart
  int64_t out_row_stride = 0;
  DType out_type = DType::kBFloat16;
};

struct AmaxParams {
  const void* x = nullptr;  // (rows, cols), last dimension contiguous
  DType x_type = DType::kBFloat16;
  int64_t x_row_stride = 0;
  int64_t rows = 0, cols = 0;
  float* out = nullptr;  // the dynamic global scale, one element
};

namespace cpu {
void quantize(const QuantizeParams& p);
void swiglu_quantize(const QuantizeParams& p);
void dequantize(const DequantizeParams& p);
void swizzle_scales(const SwizzleParams& p);
void unswizzle_scales(const SwizzleParams& p);
void global_scale(const AmaxParams& p);
void gemm(const GemmParams& p);
}  // namespace cpu

namespace cuda {
using Stream = void*;  // cudaStream_t

void quantize(const QuantizeParams& p, Stream stream);
void swiglu_quantize(const QuantizeParams& p, Stream stream);
void dequantize(const DequantizeParams& p, Stream stream);
void swizzle_scales(const SwizzleParams& p, Stream stream);
void unswizzle_scales(const SwizzleParams& p, Stream stream);
// `scratch`: global_scale_scratch_bytes() bytes, contents arbitrary.
void global_scale(const AmaxParams& p, void* scratch, Stream stream);
size_t global_scale_scratch_bytes(const AmaxParams& p);
void epilogue(const EpilogueParams& p, Stream stream);

// The fused kernel of the emulated rung: reads the 4-bit operands once, decodes in registers.
constexpr int64_t kSmallMMax = 32;
void gemm_small_m(const GemmParams& p, Stream stream);

struct Device {
  int index, cc_major, cc_minor, sm_count;
};
Device current_device();      // cached per device
const float* device_zero();   // one float 0.0 in the current device's memory (cuBLASLt's beta)
}  // namespace cuda

}  // namespace nvfp4
