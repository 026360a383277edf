// Every schema and every binding, and nothing else. One implementation serves both devices: it
// looks at where its operands live. Fakes are in nvfp4_linear/ops.py.
#include "control.h"
#include "ops.h"

STABLE_TORCH_LIBRARY(nvfp4, m) {
  m.def("quantize(Tensor x, Tensor? global_scale=None, *, bool swizzled=True) -> (Tensor, Tensor)");
  m.def(
      "swiglu_quantize(Tensor gate_up, Tensor? global_scale=None, *, bool swizzled=True, "
      "int pad_rows_to=1) -> (Tensor, Tensor)");
  m.def(
      "dequantize(Tensor data, Tensor block_scale, Tensor? global_scale=None, *, "
      "bool swizzled=True, ScalarType? out_dtype=None) -> Tensor");
  m.def("swizzle_scales(Tensor scales) -> Tensor");
  m.def("unswizzle_scales(Tensor scales, SymInt rows, SymInt cols) -> Tensor");
  m.def("global_scale(Tensor x) -> Tensor");
  m.def("swiglu_global_scale(Tensor gate_up) -> Tensor");
  m.def(
      "gemm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, "
      "Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "gemm_a16w4(Tensor x, Tensor b, Tensor b_scale, Tensor? alpha=None, Tensor? bias=None, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "gemm_a4w16(Tensor a, Tensor w, Tensor a_scale, Tensor? alpha=None, Tensor? bias=None, "
      "ScalarType? out_dtype=None) -> Tensor");
  m.def(
      "grouped_gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor offs, "
      "Tensor? alpha=None, Tensor? bias=None, *, str ragged=\"m\", Tensor? gather=None, "
      "Tensor? scatter=None, Tensor? gamma=None, ScalarType? out_dtype=None, "
      "bool a_scale_swizzled=False, bool b_scale_swizzled=True) -> Tensor");
  // What algorithms.py asks the planner that the ops use. Strings are JSON; no tensors.
  m.def("_control(str request) -> str");
}

#define NVFP4_BIND_OPS(m)                                                   \
  m.impl("quantize", nvfp4::boxed<&nvfp4::quantize>);                       \
  m.impl("swiglu_quantize", nvfp4::boxed<&nvfp4::swiglu_quantize>);         \
  m.impl("dequantize", nvfp4::boxed<&nvfp4::dequantize>);                   \
  m.impl("swizzle_scales", nvfp4::boxed<&nvfp4::swizzle_scales>);           \
  m.impl("unswizzle_scales", nvfp4::boxed<&nvfp4::unswizzle_scales>);       \
  m.impl("global_scale", nvfp4::boxed<&nvfp4::global_scale>);               \
  m.impl("swiglu_global_scale", nvfp4::boxed<&nvfp4::swiglu_global_scale>); \
  m.impl("gemm", nvfp4::boxed<&nvfp4::gemm>);                               \
  m.impl("gemm_a16w4", nvfp4::boxed<&nvfp4::gemm_a16w4>);                   \
  m.impl("gemm_a4w16", nvfp4::boxed<&nvfp4::gemm_a4w16>);                   \
  m.impl("grouped_gemm", nvfp4::boxed<&nvfp4::grouped_gemm>)

STABLE_TORCH_LIBRARY_IMPL(nvfp4, CPU, m) { NVFP4_BIND_OPS(m); }
STABLE_TORCH_LIBRARY_IMPL(nvfp4, CUDA, m) { NVFP4_BIND_OPS(m); }
STABLE_TORCH_LIBRARY_IMPL(nvfp4, CompositeExplicitAutograd, m) {
  m.impl("_control", nvfp4::boxed<&nvfp4::control>);
}
