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

// Rows of two operands of one k, decoded in one launch if few; either may have none. Scales are
// swizzled, out is BF16 or FP16.
struct DequantizePairParams {
  struct Side {
    const uint8_t* data = nullptr;
    const uint8_t* block_scale = nullptr;
    int64_t row_begin = 0, rows = 0;
    void* out = nullptr;
  };
  Side a, b;
  int64_t k = 0;
  DType out_type = DType::kBFloat16;
};

struct SwizzleParams {
  const uint8_t* in = nullptr;
  uint8_t* out = nullptr;  // swizzle: every padding byte is written 0x00
  int64_t rows = 0;
  int64_t cols = 0;  // scales a row, k / kBlockSize
};

// One side of a GEMM, rows along M or N: packed NVFP4 with its block scales, or dense where `scale`
// is null.
struct Operand {
  const void* data = nullptr;
  const uint8_t* scale = nullptr;
  bool swizzled = true;           // of packed scales: 128x4 tiles, else row-major
  DType type = DType::kBFloat16;  // of dense data
  int64_t row_stride = 0;         // elements of a dense row; a packed row has k of them
};

// One gemm a group, the groups' sizes on the operands' device: see grouped_gemm in ops.py.
struct GroupedGemmParams {
  Operand a;  // ragged M: (a_rows, k); ragged K: (m, k)
  Operand b;  // ragged M: `groups` times (n, k); ragged K: (n, k)
  bool ragged_k = false;
  const int32_t* offs = nullptr;  // (groups,) cumulative ends, of rows or of columns along K
  int64_t groups = 0;
  int64_t m = 0, n = 0, k = 0;  // m: rows of the problem, after gather; k: of all groups together
  int64_t a_rows = 0;
  const int32_t* gather = nullptr;   // (m,): row i of the problem is a's row gather[i]
  const int32_t* scatter = nullptr;  // (m,): its result goes to row scatter[i], -1 drops it
  const float* gamma = nullptr;      // (m,): scales row i after bias
  Scalar alpha;
  const float* group_alpha = nullptr;  // (groups,), in alpha's stead
  const void* bias = nullptr;          // (groups, n)
  DType bias_type = DType::kFloat32;
  void* out = nullptr;  // ragged M: (m, n), zeroed by the kernel; ragged K: (groups, m, n)
  DType out_type = DType::kBFloat16;
  // Faults that tests switch on: see faults_for_tests.h.
  bool rows_not_zeroed = false, stale_padding = false;
};

// D (m, n) = out(alpha * A (m, k) . B (n, k)^T + bias). The two sides are alike: (A . B^T)^T =
// B . A^T, so whatever one may be, packed or dense, so may the other.
struct GemmParams {
  Operand a, b;
  int64_t m = 0, n = 0, k = 0;
  Scalar alpha;
  const void* bias = nullptr;  // (n,) or null
  DType bias_type = DType::kFloat32;
  void* out = nullptr;  // (m, n) contiguous
  DType out_type = DType::kBFloat16;
};

// The same for a packed B with 128x4 scales and rows [a_row_begin, a_row_begin + m) of A.
struct SmallMParams {
  const void* a = nullptr;
  const uint8_t* a_scale = nullptr;  // null: A is dense
  DType a_type = DType::kBFloat16;   // of a dense A
  int64_t a_row_stride = 0;          // elements of a dense A
  int64_t a_row_begin = 0;
  const uint8_t* b = nullptr;  // (n, k / 2)
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
  bool swiglu = false;   // of silu(gate) * up: x is (rows, 2 cols) = [gate | up], cols % 8 == 0
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
// std::invalid_argument names an offset or index that is out of range; nothing is written then.
void grouped_gemm(const GroupedGemmParams& p);
}  // namespace cpu

namespace cuda {
using Stream = void*;  // cudaStream_t

void quantize(const QuantizeParams& p, Stream stream);
void swiglu_quantize(const QuantizeParams& p, Stream stream);
void dequantize(const DequantizeParams& p, Stream stream);
void dequantize_pair(const DequantizePairParams& p, Stream stream);
void swizzle_scales(const SwizzleParams& p, Stream stream);
void unswizzle_scales(const SwizzleParams& p, Stream stream);
// `scratch`: global_scale_scratch_bytes() bytes, contents arbitrary.
void global_scale(const AmaxParams& p, void* scratch, Stream stream);
size_t global_scale_scratch_bytes(const AmaxParams& p);
void epilogue(const EpilogueParams& p, Stream stream);

// The fused kernel of the emulated rung: reads the 4-bit operands once, decodes in registers.
constexpr int64_t kSmallMMax = 32;
void gemm_small_m(const SmallMParams& p, Stream stream);

// The same on Hopper (compute capability 9.0). Everything 16-byte aligned, k a multiple of 32 below
// 2^24 and a dense row's stride of 8; where kHasHopperKernels.
void gemm_small_m_hopper(const SmallMParams& p, Stream stream);

// The same on Hopper (compute capability 9.0) for more rows, all of A from row 0. Everything
// 16-byte aligned, k a multiple of 32 and a dense row's stride of 8. `workspace`: mid_m_workspace()
// bytes of the plan (mid_m_plan.h), contents arbitrary.
constexpr int64_t kMidMMax = 2048;
void gemm_mid_m(const SmallMParams& p, void* workspace, Stream stream);

struct Device {
  int index, cc_major, cc_minor, sm_count;
};
Device current_device();  // cached per device

// While this lives, `index` is the current device of the thread, and nobody asks CUDA again.
class KnownDevice {
 public:
  explicit KnownDevice(int index);
  ~KnownDevice();
  KnownDevice(const KnownDevice&) = delete;
  KnownDevice& operator=(const KnownDevice&) = delete;

 private:
  int before_;
};

const float* device_zero();  // one float 0.0 in the current device's memory (cuBLASLt's beta)
}  // namespace cuda

}  // namespace nvfp4
