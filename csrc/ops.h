// Every op, once: validate, allocate, call the kernel of the operands' device. Schemas and their
// bindings are in registration.cpp; what each op computes is in nvfp4_linear/ops.py's docstrings.
#pragma once

#include <string>
#include <tuple>

#include "tensors.h"

namespace nvfp4 {

using OptTensor = std::optional<Tensor>;
using OptType = std::optional<ScalarType>;

std::tuple<Tensor, Tensor> quantize(Tensor x, OptTensor global_scale, bool swizzled);
std::tuple<Tensor, Tensor> swiglu_quantize(Tensor gate_up, OptTensor global_scale, bool swizzled,
                                           int64_t pad_rows_to);
Tensor dequantize(Tensor data, Tensor block_scale, OptTensor global_scale, bool swizzled,
                  OptType out_dtype);
Tensor swizzle_scales(Tensor scales);
Tensor unswizzle_scales(Tensor scales, int64_t rows, int64_t cols);
Tensor global_scale(Tensor x);
Tensor swiglu_global_scale(Tensor gate_up);
Tensor gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, OptTensor alpha, OptTensor bias,
            OptType out_dtype);
Tensor gemm_a16w4(Tensor x, Tensor b, Tensor b_scale, OptTensor alpha, OptTensor bias,
                  OptType out_dtype);

Tensor gemm_a4w16(Tensor a, Tensor w, Tensor a_scale, OptTensor alpha, OptTensor bias,
                  OptType out_dtype);
Tensor grouped_gemm(Tensor a, Tensor b, OptTensor a_scale, OptTensor b_scale, Tensor offs,
                    OptTensor alpha, OptTensor bias, std::string ragged, OptTensor gather,
                    OptTensor scatter, OptTensor gamma, OptType out_dtype, bool a_scale_swizzled,
                    bool b_scale_swizzled);

}  // namespace nvfp4
