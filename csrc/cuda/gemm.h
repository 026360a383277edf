// gemm and gemm_a16w4 on a GPU: validate (ops.cpp) -> plan (ladder.h) -> launch.
#pragma once

#include "../kernels.h"

namespace nvfp4::cuda {

// Runs on the first rung that takes the problem, on `stream`. The operands' device is current.
// std::runtime_error lists every rung's reason where none does.
void gemm(const GemmParams& p, Stream stream);

// See grouped_gemm in ops.py. Never reads offs, gather or scatter on the host.
void grouped_gemm(const GroupedGemmParams& p, Stream stream);

}  // namespace nvfp4::cuda
