// Wrong results that NVIDIA's release notes admit, as a table to plan around.

#pragma once

#include <cstddef>
#include <string>

#include "algorithm.h"
#include "problem.h"

namespace nvfp4::cublaslt {

// Empty, or the known fault that `problem` would run into on this version of cuBLASLt: with
// `algorithm`, or whatever the algorithm where that is null.
std::string known_fault(const Problem& problem, const Algorithm* algorithm, size_t library_version);

// cublasLtMatmulAlgoGetHeuristic returns INTERNAL_ERROR and invalidates a CUDA graph capture in
// flight on these versions: plan before capturing.
bool heuristic_breaks_capture(size_t library_version);

}  // namespace nvfp4::cublaslt
