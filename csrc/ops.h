// Every op, once: validate, allocate, call the kernel of the operands' device. Schemas and their
// bindings are in registration.cpp; what each op computes is in nvfp4_linear/ops.py's docstrings.
#pragma once

#include <string>
#include <tuple>

#include "tensors.h"

namespace nvfp4 {

using OptTensor = std::optional<Tensor>;
using OptType = std::optional<ScalarType>;

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const OptTensor& global_scale, bool swizzled);
std::tuple<Tensor, Tensor> swiglu_quantize(const Tensor& gate_up, const OptTensor& global_scale,
                                           bool swizzled, int64_t pad_rows_to);
Tensor dequantize(const Tensor& data, const Tensor& block_scale, const OptTensor& global_scale,
                  bool swizzled, const OptType& out_dtype);
Tensor swizzle_scales(const Tensor& scales);
Tensor unswizzle_scales(const Tensor& scales, int64_t rows, int64_t cols);
Tensor global_scale(const Tensor& x);
Tensor swiglu_global_scale(const Tensor& gate_up);
Tensor gemm(const Tensor& a, const Tensor& b, const Tensor& a_scale, const Tensor& b_scale,
            const OptTensor& alpha, const OptTensor& bias, const OptType& out_dtype);
Tensor gemm_a16w4(const Tensor& x, const Tensor& b, const Tensor& b_scale, const OptTensor& alpha,
                  const OptTensor& bias, const OptType& out_dtype);

Tensor gemm_a4w16(const Tensor& a, const Tensor& w, const Tensor& a_scale, const OptTensor& alpha,
                  const OptTensor& bias, const OptType& out_dtype);
Tensor grouped_gemm(const Tensor& a, const Tensor& b, const OptTensor& a_scale,
                    const OptTensor& b_scale, const Tensor& offs, const OptTensor& alpha,
                    const OptTensor& bias, const std::string& ragged, const OptTensor& gather,
                    const OptTensor& scatter, const OptTensor& gamma, const OptType& out_dtype,
                    bool a_scale_swizzled, bool b_scale_swizzled);

}  // namespace nvfp4
