#include "ops.h"

#include "check.h"
#if defined(NVFP4_WITH_CUDA)
#include "cuda/gemm.h"
#endif
#include "ladder.h"
#include "nvfp4.h"

namespace nvfp4 {
namespace {

// Calls cuda::function(params, ..., stream) or cpu::function(params).
#if defined(NVFP4_WITH_CUDA)
#define NVFP4_LAUNCH(function, tensor, params)    \
  do {                                            \
    const CudaScope scope(tensor);                \
    if ((tensor).is_cuda()) {                     \
      cuda::function(params, scope.stream());     \
    } else {                                      \
      cpu::function(params);                      \
    }                                             \
  } while (0)
#else
#define NVFP4_LAUNCH(function, tensor, params) \
  do {                                         \
    const CudaScope scope(tensor);             \
    cpu::function(params);                     \
  } while (0)
#endif

uint8_t* bytes(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* const_bytes(const Tensor& tensor) {
  return static_cast<const uint8_t*>(tensor.const_data_ptr());
}

Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Scalar check_global_scale(const OptTensor& global_scale, const Tensor& operand) {
  const Scalar g = check_scalar(global_scale, "global_scale", operand);
  NVFP4_CHECK(g.device || is_usable_global_scale(g.value),
              "global_scale must be finite and > 0, got ", g.value,
              ": torch.ops.nvfp4.global_scale(x) computes it (decode direction, amax / 2688)");
  return g;
}

// The outputs of a producer for `k` columns, and the parameters that write them.
struct Producer {
  QuantizeParams params;
  Tensor data, block_scale;
};

Producer make_producer(const Rows& x, DType type, const OptTensor& global_scale, bool swizzled,
                       int64_t k, int64_t padded_rows, const std::vector<int64_t>& leading) {
  const int64_t cols = k / kBlockSize;
  std::vector<int64_t> data_sizes = leading, scale_sizes = leading;
  data_sizes.push_back(k / 2);
  scale_sizes.push_back(cols);
  if (swizzled) scale_sizes = swizzled_sizes(padded_rows, cols);
  Producer out{{}, allocate(data_sizes, ScalarType::Byte, x.tensor),
               allocate(scale_sizes, ScalarType::Float8_e4m3fn, x.tensor)};
  out.params.x = x.tensor.const_data_ptr();
  out.params.x_type = type;
  out.params.x_row_stride = x.stride;
  out.params.rows = x.rows;
  out.params.padded_rows = padded_rows;
  out.params.k = k;
  out.params.global_scale = check_global_scale(global_scale, x.tensor);
  out.params.data = bytes(out.data);
  out.params.block_scale = bytes(out.block_scale);
  out.params.swizzled = swizzled;
  return out;
}

std::vector<int64_t> leading_sizes(const Tensor& x) {
  const auto sizes = x.sizes();
  return {sizes.begin(), sizes.end() - 1};
}

struct Bias {
  Tensor storage;
  const void* data = nullptr;
  DType type = DType::kFloat32;
};

Bias check_bias(const OptTensor& bias, int64_t n, const Tensor& operand) {
  if (!bias) return {operand};
  const auto type = float_type(bias->scalar_type());
  NVFP4_CHECK(type, "bias.dtype must be float32, bfloat16 or float16, got ",
              dtype_text(bias->scalar_type()));
  NVFP4_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias must have shape (", n,
              ",) = (N,), got ", shape_text(*bias));
  check_same_device(*bias, "bias", operand, "the operands");
  const Tensor dense = as_contiguous(*bias);
  return {dense, dense.const_data_ptr(), *type};
}

// Everything gemm and gemm_a16w4 share once A is known: B, scales, alpha, bias, output.
Tensor run_gemm(GemmParams p, const Tensor& a, int64_t a_k, const Tensor& b, const Tensor& b_scale,
                const OptTensor& alpha, const OptTensor& bias, const OptType& out_dtype,
                DType default_out) {
  const int64_t k = check_packed(b, "b");
  NVFP4_CHECK(b.dim() == 2, "b must be (N, K/2), got shape ", shape_text(b));
  NVFP4_CHECK(k == a_k, "a and b must have the same K, got ", a_k, " and ", k,
              " (b is (N, K/2) with shape ", shape_text(b),
              "): both operands are row-major along K, D = A . B^T");
  p.n = b.size(0);
  p.k = k;
  check_scale(b_scale, "b_scale", p.n, k / kBlockSize, /*swizzled=*/true);
  check_same_device(b, "b", a, "a");
  check_same_device(b_scale, "b_scale", a, "a");
  p.alpha = check_scalar(alpha, "alpha", a);
  const Bias checked_bias = check_bias(bias, p.n, a);
  p.bias = checked_bias.data;
  p.bias_type = checked_bias.type;
  p.out_type = check_out_dtype(out_dtype, default_out);
  const Tensor b_dense = as_contiguous(b), b_scale_dense = as_contiguous(b_scale);
  p.b = const_bytes(b_dense);
  p.b_scale = const_bytes(b_scale_dense);
  Tensor out = allocate(sizes_with_last(a, p.n), scalar_type(p.out_type), a);
  p.out = out.mutable_data_ptr();
  if (p.m == 0 || p.n == 0) return out;
  const CudaScope scope(a);
#if defined(NVFP4_WITH_CUDA)
  if (a.is_cuda()) {
    cuda::gemm(p, a, scope.stream());
    return out;
  }
#endif
  NVFP4_CHECK(k <= kExactKMax, "K must be at most ", kExactKMax,
              " on the CPU (the exact 64-bit accumulator's limit), got ", k);
  check_cpu_allowed();
  cpu::gemm(p);
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize(Tensor x, OptTensor global_scale, bool swizzled) {
  const DType type = check_activation(x, "x", kBlockSize, /*allow_float32=*/true);
  const Rows rows = as_rows(x);
  const auto out = make_producer(rows, type, global_scale, swizzled, rows.cols, rows.rows,
                                 leading_sizes(x));
  if (rows.rows) NVFP4_LAUNCH(quantize, rows.tensor, out.params);
  return {out.data, out.block_scale};
}

std::tuple<Tensor, Tensor> swiglu_quantize(Tensor gate_up, OptTensor global_scale, bool swizzled,
                                           int64_t pad_rows_to) {
  const DType type = check_activation(gate_up, "gate_up", 2 * kBlockSize, /*allow_float32=*/true);
  NVFP4_CHECK(pad_rows_to >= 1, "pad_rows_to must be at least 1, got ", pad_rows_to);
  const Rows rows = as_rows(gate_up);
  const int64_t padded_rows = round_up(rows.rows, pad_rows_to);
  // Padded rows have no leading shape to belong to: the result is then (rows, K/2).
  const auto leading =
      padded_rows == rows.rows ? leading_sizes(gate_up) : std::vector<int64_t>{padded_rows};
  const auto out = make_producer(rows, type, global_scale, swizzled, rows.cols / 2, padded_rows,
                                 leading);
  if (rows.rows) NVFP4_LAUNCH(swiglu_quantize, rows.tensor, out.params);
  return {out.data, out.block_scale};
}

Tensor dequantize(Tensor data, Tensor block_scale, OptTensor global_scale, bool swizzled,
                  OptType out_dtype) {
  DequantizeParams p;
  p.k = check_packed(data, "data");
  p.rows = rows_of(data);
  check_scale(block_scale, "block_scale", p.rows, p.k / kBlockSize, swizzled);
  check_same_device(block_scale, "block_scale", data, "data");
  p.global_scale = check_global_scale(global_scale, data);
  p.out_type = check_out_dtype(out_dtype, DType::kFloat32);
  const Tensor data_dense = as_contiguous(data), scale_dense = as_contiguous(block_scale);
  p.data = const_bytes(data_dense);
  p.block_scale = const_bytes(scale_dense);
  p.swizzled = swizzled;
  Tensor out = allocate(sizes_with_last(data, p.k), scalar_type(p.out_type), data);
  p.out = out.mutable_data_ptr();
  if (p.rows) NVFP4_LAUNCH(dequantize, data, p);
  return out;
}

Tensor swizzle_scales(Tensor scales) {
  NVFP4_CHECK(scales.scalar_type() == ScalarType::Float8_e4m3fn,
              "scales.dtype must be float8_e4m3fn, got ", dtype_text(scales.scalar_type()));
  NVFP4_CHECK(scales.dim() == 2, "scales must be (rows, K/16), got shape ", shape_text(scales));
  const Tensor dense = as_contiguous(scales);
  const SwizzleParams shape{const_bytes(dense), nullptr, scales.size(0), scales.size(1)};
  Tensor out = allocate(swizzled_sizes(shape.rows, shape.cols), ScalarType::Float8_e4m3fn, scales);
  const SwizzleParams p{shape.in, bytes(out), shape.rows, shape.cols};
  if (p.rows && p.cols) NVFP4_LAUNCH(swizzle_scales, scales, p);
  return out;
}

Tensor unswizzle_scales(Tensor scales, int64_t rows, int64_t cols) {
  NVFP4_CHECK(rows >= 0 && cols >= 0, "rows and cols must be >= 0, got ", rows, " and ", cols);
  check_scale(scales, "scales", rows, cols, /*swizzled=*/true);
  const Tensor dense = as_contiguous(scales);
  Tensor out = allocate({rows, cols}, ScalarType::Float8_e4m3fn, scales);
  const SwizzleParams p{const_bytes(dense), bytes(out), rows, cols};
  if (rows && cols) NVFP4_LAUNCH(unswizzle_scales, scales, p);
  return out;
}

Tensor global_scale(Tensor x) {
  const auto type = float_type(x.scalar_type());
  NVFP4_CHECK(type, "x.dtype must be float32, bfloat16 or float16, got ",
              dtype_text(x.scalar_type()));
  AmaxParams p;
  p.x_type = *type;
  const Rows rows = x.dim() ? as_rows(x) : Rows{x, 1, 1, 1};
  p.x = rows.tensor.const_data_ptr();
  p.x_row_stride = rows.stride;
  p.rows = rows.rows;
  p.cols = rows.cols;
  Tensor out = allocate({}, ScalarType::Float, x);
  p.out = static_cast<float*>(out.mutable_data_ptr());
  const CudaScope scope(x);
#if defined(NVFP4_WITH_CUDA)
  if (x.is_cuda()) {
    const auto scratch_bytes = static_cast<int64_t>(cuda::global_scale_scratch_bytes(p));
    const Tensor scratch = allocate({scratch_bytes}, ScalarType::Byte, x);
    cuda::global_scale(p, scratch.mutable_data_ptr(), scope.stream());
    return out;
  }
#endif
  cpu::global_scale(p);
  return out;
}

Tensor gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, OptTensor alpha, OptTensor bias,
            OptType out_dtype) {
  GemmParams p;
  const int64_t k = check_packed(a, "a");
  p.m = rows_of(a);
  check_scale(a_scale, "a_scale", p.m, k / kBlockSize, /*swizzled=*/true);
  check_same_device(a_scale, "a_scale", a, "a");
  const Tensor a_dense = as_contiguous(a), a_scale_dense = as_contiguous(a_scale);
  p.a = a_dense.const_data_ptr();
  p.a_scale = const_bytes(a_scale_dense);
  return run_gemm(p, a_dense, k, b, b_scale, alpha, bias, out_dtype, DType::kBFloat16);
}

Tensor gemm_a16w4(Tensor x, Tensor b, Tensor b_scale, OptTensor alpha, OptTensor bias,
                  OptType out_dtype) {
  GemmParams p;
  p.a_type = check_activation(x, "x", kBlockSize, /*allow_float32=*/false);
  const Rows rows = as_rows(x);
  p.a = rows.tensor.const_data_ptr();
  p.a_row_stride = rows.stride;
  p.m = rows.rows;
  return run_gemm(p, rows.tensor, rows.cols, b, b_scale, alpha, bias, out_dtype, p.a_type);
}

}  // namespace nvfp4
