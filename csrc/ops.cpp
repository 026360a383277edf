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
#define NVFP4_LAUNCH(function, tensor, params) \
  do {                                         \
    const CudaScope scope(tensor);             \
    if ((tensor).is_cuda()) {                  \
      cuda::function(params, scope.stream());  \
    } else {                                   \
      cpu::function(params);                   \
    }                                          \
  } while (0)
#else
#define NVFP4_LAUNCH(function, tensor, params) \
  do {                                         \
    const CudaScope scope(tensor);             \
    cpu::function(params);                     \
  } while (0)
#endif

uint8_t* bytes(const Tensor& tensor) { return static_cast<uint8_t*>(tensor.mutable_data_ptr()); }
const uint8_t* bytes(const Contiguous& elements) {
  return static_cast<const uint8_t*>(elements.data);
}

Scalar check_global_scale(const OptTensor& global_scale, const Tensor& operand) {
  const Scalar g = check_scalar(global_scale, "global_scale", operand);
  NVFP4_CHECK(g.device || is_usable_global_scale(g.value),
              "global_scale must be finite and > 0, got ", g.value,
              ": torch.ops.nvfp4.global_scale(x) computes it (decode direction, amax / 2688)");
  return g;
}

// The outputs of a producer, and the parameters that write them.
struct Producer {
  QuantizeParams params;
  Tensor data, block_scale;
};

// `sizes`: of data, K / 2 the last.
Producer make_producer(const Tensor& x, const Rows& rows, DType type, const OptTensor& global_scale,
                       bool swizzled, int64_t padded_rows, Sizes sizes) {
  const int64_t k = sizes.last() * 2, cols = k / kBlockSize;
  Tensor data = allocate(sizes, ScalarType::Byte, x);
  sizes.last() = cols;
  Producer out{{},
               std::move(data),
               allocate(swizzled ? swizzled_sizes(padded_rows, cols) : std::move(sizes),
                        ScalarType::Float8_e4m3fn, x)};
  out.params.x = rows.elements.data;
  out.params.x_type = type;
  out.params.x_row_stride = rows.stride;
  out.params.rows = rows.rows;
  out.params.padded_rows = padded_rows;
  out.params.k = k;
  out.params.global_scale = check_global_scale(global_scale, x);
  out.params.data = bytes(out.data);
  out.params.block_scale = bytes(out.block_scale);
  out.params.swizzled = swizzled;
  return out;
}

struct Bias {
  Contiguous elements;
  DType type = DType::kFloat32;
};

Bias check_bias(const OptTensor& bias, int64_t n, const Tensor& operand) {
  if (!bias) return {};
  const auto type = float_type(*bias);
  NVFP4_CHECK_TYPE(type, "bias.dtype must be float32, bfloat16 or float16, got ",
                   dtype_text(bias->scalar_type()));
  NVFP4_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias must have shape (", n,
              ",) = (N,), got ", shape_text(*bias));
  check_same_device(*bias, "bias", operand, "the operands");
  return {as_contiguous(*bias), *type};
}

// One side of a product, checked: (..., K/2) packed, or (..., K) dense.
struct Side {
  const Tensor& tensor;
  int64_t rows, k;
  Contiguous data, scale;  // what the operand points into
  Operand operand;
};

Side packed_side(const Tensor& data, const Tensor& scale, const char* name,
                 const char* scale_name) {
  const int64_t k = check_packed(data, name), rows = rows_of(data);
  check_scale(scale, scale_name, rows, k / kBlockSize, /*swizzled=*/true);
  check_same_device(scale, scale_name, data, name);
  Side side{data, rows, k, as_contiguous(data), as_contiguous(scale), {}};
  side.operand.data = side.data.data;
  side.operand.scale = bytes(side.scale);
  return side;
}

Side dense_side(const Tensor& data, const char* name) {
  const DType type = check_activation(data, name, kBlockSize, /*allow_float32=*/false);
  Rows rows = as_rows(data);
  const Operand operand{rows.elements.data, nullptr, true, type, rows.stride};
  return {data, rows.rows, rows.cols, std::move(rows.elements), {}, operand};
}

// D = out(alpha * A . B^T + bias), whichever side is packed.
Tensor run_gemm(const Side& a, const Side& b, const char* a_name, const char* b_name,
                const OptTensor& alpha, const OptTensor& bias, const OptType& out_dtype,
                DType default_out) {
  NVFP4_CHECK(b.tensor.dim() == 2, b_name, " must be 2-D, N rows along K, got shape ",
              shape_text(b.tensor));
  NVFP4_CHECK(a.k == b.k, a_name, " and ", b_name, " must have the same K, got ", a.k, " and ", b.k,
              " (", b_name, " has shape ", shape_text(b.tensor),
              "): both are row-major along K, D = A . B^T");
  check_same_device(b.tensor, b_name, a.tensor, a_name);
  GemmParams p;
  p.a = a.operand;
  p.b = b.operand;
  p.m = a.rows;
  p.n = b.rows;
  p.k = a.k;
  p.alpha = check_scalar(alpha, "alpha", a.tensor);
  const Bias checked_bias = check_bias(bias, p.n, a.tensor);
  p.bias = checked_bias.elements.data;
  p.bias_type = checked_bias.type;
  p.out_type = check_out_dtype(out_dtype, default_out);
  Tensor out = allocate(sizes_with_last(a.tensor, p.n), scalar_type(p.out_type), a.tensor);
  p.out = out.mutable_data_ptr();
  if (p.m == 0 || p.n == 0) return out;
  const CudaScope scope(a.tensor);
#if defined(NVFP4_WITH_CUDA)
  if (a.tensor.is_cuda()) {
    cuda::gemm(p, scope.stream());
    return out;
  }
#endif
  NVFP4_CHECK(p.k <= kExactKMax, "K must be at most ", kExactKMax,
              " on the CPU (the exact 64-bit accumulator's limit), got ", p.k);
  check_cpu_allowed();
  cpu::gemm(p);
  return out;
}

Tensor run_global_scale(const Tensor& x, const Rows& rows, DType type, bool swiglu) {
  AmaxParams p;
  p.x = rows.elements.data;
  p.x_type = type;
  p.x_row_stride = rows.stride;
  p.rows = rows.rows;
  p.cols = swiglu ? rows.cols / 2 : rows.cols;
  p.swiglu = swiglu;
  Tensor out = allocate({}, ScalarType::Float, x);
  p.out = static_cast<float*>(out.mutable_data_ptr());
  const CudaScope scope(x);
#if defined(NVFP4_WITH_CUDA)
  if (x.is_cuda()) {
    const Workspace scratch(static_cast<int64_t>(cuda::global_scale_scratch_bytes(p)));
    cuda::global_scale(p, scratch.data(), scope.stream());
    return out;
  }
#endif
  cpu::global_scale(p);
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const OptTensor& global_scale, bool swizzled) {
  const DType type = check_activation(x, "x", kBlockSize, /*allow_float32=*/true);
  const Rows rows = as_rows(x);
  Producer out = make_producer(x, rows, type, global_scale, swizzled, rows.rows,
                               sizes_with_last(x, rows.cols / 2));
  if (rows.rows) NVFP4_LAUNCH(quantize, x, out.params);
  return {std::move(out.data), std::move(out.block_scale)};
}

std::tuple<Tensor, Tensor> swiglu_quantize(const Tensor& gate_up, const OptTensor& global_scale,
                                           bool swizzled, int64_t pad_rows_to) {
  const DType type = check_activation(gate_up, "gate_up", 2 * kBlockSize, /*allow_float32=*/true);
  NVFP4_CHECK(pad_rows_to >= 1, "pad_rows_to must be at least 1, got ", pad_rows_to);
  const Rows rows = as_rows(gate_up);
  const int64_t padded_rows = round_up(rows.rows, pad_rows_to);
  // Padded rows have no leading shape to belong to: where padding is asked for, data is 2-D.
  auto sizes = pad_rows_to == 1 ? sizes_with_last(gate_up, rows.cols / 4)
                                : Sizes{padded_rows, rows.cols / 4};
  Producer out =
      make_producer(gate_up, rows, type, global_scale, swizzled, padded_rows, std::move(sizes));
  if (rows.rows) NVFP4_LAUNCH(swiglu_quantize, gate_up, out.params);
  return {std::move(out.data), std::move(out.block_scale)};
}

Tensor dequantize(const Tensor& data, const Tensor& block_scale, const OptTensor& global_scale,
                  bool swizzled, const OptType& out_dtype) {
  DequantizeParams p;
  p.k = check_packed(data, "data");
  p.rows = rows_of(data);
  check_scale(block_scale, "block_scale", p.rows, p.k / kBlockSize, swizzled);
  check_same_device(block_scale, "block_scale", data, "data");
  p.global_scale = check_global_scale(global_scale, data);
  p.out_type = check_out_dtype(out_dtype, DType::kFloat32);
  const Contiguous codes = as_contiguous(data), scales = as_contiguous(block_scale);
  p.data = bytes(codes);
  p.block_scale = bytes(scales);
  p.swizzled = swizzled;
  Tensor out = allocate(sizes_with_last(data, p.k), scalar_type(p.out_type), data);
  p.out = out.mutable_data_ptr();
  if (p.rows) NVFP4_LAUNCH(dequantize, data, p);
  return out;
}

Tensor swizzle_scales(const Tensor& scales) {
  NVFP4_CHECK_TYPE(scales.has_type(ScalarType::Float8_e4m3fn),
                   "scales.dtype must be float8_e4m3fn, got ", dtype_text(scales.scalar_type()));
  NVFP4_CHECK(scales.dim() == 2, "scales must be (rows, K/16), got shape ", shape_text(scales));
  const Contiguous dense = as_contiguous(scales);
  const SwizzleParams shape{bytes(dense), nullptr, scales.size(0), scales.size(1)};
  Tensor out = allocate(swizzled_sizes(shape.rows, shape.cols), ScalarType::Float8_e4m3fn, scales);
  const SwizzleParams p{shape.in, bytes(out), shape.rows, shape.cols};
  if (p.rows && p.cols) NVFP4_LAUNCH(swizzle_scales, scales, p);
  return out;
}

Tensor unswizzle_scales(const Tensor& scales, int64_t rows, int64_t cols) {
  NVFP4_CHECK(rows >= 0 && cols >= 0, "rows and cols must be >= 0, got ", rows, " and ", cols);
  check_scale(scales, "scales", rows, cols, /*swizzled=*/true);
  const Contiguous dense = as_contiguous(scales);
  Tensor out = allocate({rows, cols}, ScalarType::Float8_e4m3fn, scales);
  const SwizzleParams p{bytes(dense), bytes(out), rows, cols};
  if (rows && cols) NVFP4_LAUNCH(unswizzle_scales, scales, p);
  return out;
}

Tensor global_scale(const Tensor& x) {
  const auto type = float_type(x);
  NVFP4_CHECK_TYPE(type, "x.dtype must be float32, bfloat16 or float16, got ",
                   dtype_text(x.scalar_type()));
  const Rows rows = x.dim() ? as_rows(x) : Rows{as_contiguous(x), 1, 1, 1};
  return run_global_scale(x, rows, *type, /*swiglu=*/false);
}

Tensor swiglu_global_scale(const Tensor& gate_up) {
  const DType type = check_activation(gate_up, "gate_up", 2 * kBlockSize, /*allow_float32=*/true);
  return run_global_scale(gate_up, as_rows(gate_up), type, /*swiglu=*/true);
}

Tensor gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
            const OptTensor& alpha, const OptTensor& bias, const OptType& out_dtype) {
  return run_gemm(packed_side(a, a_scale, "a", "a_scale"), packed_side(b, b_scale, "b", "b_scale"),
                  "a", "b", alpha, bias, out_dtype, DType::kBFloat16);
}

Tensor gemm_a16w4(const Tensor& x, const Tensor& b, const Tensor& b_scale, const OptTensor& alpha,
                  const OptTensor& bias, const OptType& out_dtype) {
  const Side dense = dense_side(x, "x");
  return run_gemm(dense, packed_side(b, b_scale, "b", "b_scale"), "x", "b", alpha, bias, out_dtype,
                  dense.operand.type);
}

Tensor gemm_a4w16(const Tensor& a, const Tensor& w, const Tensor& a_scale, const OptTensor& alpha,
                  const OptTensor& bias, const OptType& out_dtype) {
  const Side dense = dense_side(w, "w");
  return run_gemm(packed_side(a, a_scale, "a", "a_scale"), dense, "a", "w", alpha, bias, out_dtype,
                  dense.operand.type);
}

}  // namespace nvfp4
