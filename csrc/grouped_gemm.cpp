// torch.ops.nvfp4.grouped_gemm: validate, allocate, call the kernel of the operands' device.
#include <string>

#include "check.h"
#include "faults_for_tests.h"
#include "ladder.h"
#include "nvfp4.h"
#include "ops.h"
#if defined(NVFP4_WITH_CUDA)
#include "cuda/gemm.h"
#endif

namespace nvfp4 {
namespace {

// One side, checked: (rows, K) or, for a stack, (groups, rows, K).
struct Side {
  int64_t rows, k;
  Contiguous data, scale;  // what the operand points into
  Operand operand;
};

Side check_side(const Tensor& data, const OptTensor& scale, const char* name,
                const char* scale_name, int64_t dims, bool swizzled) {
  NVFP4_CHECK(data.dim() == dims, name, " must have ", dims, " dimensions, got shape ",
              shape_text(data));
  Side side{data.size(dims - 2), 0, as_contiguous(data), {}, {}};
  side.operand.data = side.data.data;
  side.operand.swizzled = swizzled;
  if (!scale) {
    NVFP4_CHECK_TYPE(float_type(data).has_value(), scale_name,
                     " must be given for packed data: ", name, " is ",
                     dtype_text(data.scalar_type()));
    side.operand.type = check_activation(data, name, kBlockSize, /*allow_float32=*/false);
    side.k = side.operand.row_stride = last_dim(data);
    return side;
  }
  side.k = check_packed(data, name);
  const int64_t cols = side.k / kBlockSize, groups = dims == 3 ? data.size(0) : 1;
  const int64_t scale_rows = swizzled ? round_up(side.rows, kTileRows) : side.rows;
  const int64_t scale_cols = swizzled ? round_up(cols, kTileCols) : cols;
  NVFP4_CHECK_TYPE(scale->has_type(ScalarType::Float8_e4m3fn), scale_name,
                   ".dtype must be float8_e4m3fn, got ", dtype_text(scale->scalar_type()));
  const bool shape = scale->dim() == dims && scale->size(dims - 2) == scale_rows &&
                     last_dim(*scale) == scale_cols && (dims == 2 || scale->size(0) == groups);
  NVFP4_CHECK(shape, scale_name, " must be ", swizzled ? "swizzled (128x4 tiles)" : "row-major",
              " with shape (", dims == 3 ? concat(groups, ", ") : std::string(), scale_rows, ", ",
              scale_cols, "), got ", shape_text(*scale), ": ", scale_name,
              "_swizzled says which layout it has");
  check_same_device(*scale, scale_name, data, name);
  side.scale = as_contiguous(*scale);
  side.operand.scale = static_cast<const uint8_t*>(side.scale.data);
  return side;
}

// A vector of `count` elements, of any number where that is negative, on the device of `like`.
Contiguous check_vector(const Tensor& tensor, const char* name, ScalarType type, int64_t count,
                        const Tensor& like) {
  NVFP4_CHECK_TYPE(tensor.has_type(type), name, ".dtype must be ", dtype_text(type), ", got ",
                   dtype_text(tensor.scalar_type()));
  NVFP4_CHECK(tensor.dim() == 1 && (count < 0 || tensor.size(0) == count), name,
              " must have shape (", count < 0 ? std::string("rows") : std::to_string(count),
              ",), got ", shape_text(tensor));
  check_same_device(tensor, name, like, "a");
  return as_contiguous(tensor);
}

Contiguous check_vector(const OptTensor& tensor, const char* name, ScalarType type, int64_t count,
                        const Tensor& like) {
  return tensor ? check_vector(*tensor, name, type, count, like) : Contiguous{};
}

}  // namespace

Tensor grouped_gemm(const Tensor& a, const Tensor& b, const OptTensor& a_scale,
                    const OptTensor& b_scale, const Tensor& offs, const OptTensor& alpha,
                    const OptTensor& bias, const std::string& ragged, const OptTensor& gather,
                    const OptTensor& scatter, const OptTensor& gamma, const OptType& out_dtype,
                    bool a_scale_swizzled, bool b_scale_swizzled) {
  NVFP4_CHECK(ragged == "m" || ragged == "k", "ragged must be 'm' or 'k', got '", ragged, "'");
  GroupedGemmParams p;
  p.ragged_k = ragged == "k";
  p.rows_not_zeroed = has_fault(Fault::kRowsNotZeroed);
  p.stale_padding = has_fault(Fault::kStalePadding);
  NVFP4_CHECK(!p.ragged_k || (!gather && !scatter),
              "gather and scatter move rows of ragged M; with ragged = 'k' they must be None");
  const Side left = check_side(a, a_scale, "a", "a_scale", 2, a_scale_swizzled);
  const Side right = check_side(b, b_scale, "b", "b_scale", p.ragged_k ? 2 : 3, b_scale_swizzled);
  check_same_device(b, "b", a, "a");
  NVFP4_CHECK(left.k == right.k, "a and b must have the same K, got ", left.k, " and ", right.k);
  NVFP4_CHECK(left.operand.scale || right.operand.scale || left.operand.type == right.operand.type,
              "a and b, both dense, must have the same dtype, got ", dtype_text(a.scalar_type()),
              " and ", dtype_text(b.scalar_type()));
  p.a = left.operand;
  p.b = right.operand;
  p.k = left.k;
  p.n = right.rows;
  p.a_rows = left.rows;
  const Contiguous ends =
      check_vector(offs, "offs", ScalarType::Int, p.ragged_k ? -1 : b.size(0), a);
  p.offs = static_cast<const int32_t*>(ends.data);
  p.groups = offs.size(0);
  const Contiguous from = check_vector(gather, "gather", ScalarType::Int, -1, a);
  p.gather = static_cast<const int32_t*>(from.data);
  p.m = gather ? gather->size(0) : left.rows;
  const Contiguous to = check_vector(scatter, "scatter", ScalarType::Int, p.m, a);
  p.scatter = static_cast<const int32_t*>(to.data);
  if (has_fault(Fault::kGatherIgnored)) p.gather = nullptr;
  if (has_fault(Fault::kScatterIgnored)) p.scatter = nullptr;
  const Contiguous row_scale = check_vector(gamma, "gamma", ScalarType::Float, p.m, a);
  p.gamma = static_cast<const float*>(row_scale.data);
  Contiguous group_alpha;
  if (alpha && alpha->dim() == 1 && alpha->numel() != 1) {
    group_alpha = check_vector(alpha, "alpha", ScalarType::Float, p.groups, a);
    p.group_alpha = static_cast<const float*>(group_alpha.data);
  } else {
    p.alpha = check_scalar(alpha, "alpha", a);
  }
  Contiguous bias_elements;
  if (bias) {
    const auto type = float_type(*bias);
    NVFP4_CHECK_TYPE(type, "bias.dtype must be float32, bfloat16 or float16, got ",
                     dtype_text(bias->scalar_type()));
    NVFP4_CHECK(bias->dim() == 2 && bias->size(0) == p.groups && bias->size(1) == p.n,
                "bias must have shape (", p.groups, ", ", p.n, ") = (E, N), got ",
                shape_text(*bias));
    check_same_device(*bias, "bias", a, "a");
    bias_elements = as_contiguous(*bias);
    p.bias = bias_elements.data;
    p.bias_type = *type;
  }
  p.out_type = check_out_dtype(out_dtype, DType::kBFloat16);
  Tensor out = allocate(p.ragged_k ? Sizes{p.groups, p.m, p.n} : Sizes{p.m, p.n},
                        scalar_type(p.out_type), a);
  p.out = out.mutable_data_ptr();
  if (out.numel() == 0) return out;
  const CudaScope scope(a);
#if defined(NVFP4_WITH_CUDA)
  if (a.is_cuda()) {
    cuda::grouped_gemm(p, scope.stream());
    return out;
  }
#endif
  NVFP4_CHECK(p.k <= kExactKMax, "K must be at most ", kExactKMax, " on the CPU, got ", p.k);
  check_cpu_allowed();
  cpu::grouped_gemm(p);
  return out;
}

}  // namespace nvfp4
