// The kernels behind cuda::grouped_gemm, on raw pointers; grouped_gemm.cpp picks one.
//
// None reads offs, gather or scatter on the host, and none trusts them: offsets are clamped to the
// problem and made non-decreasing, a row whose index is out of range is zero or dropped.
#pragma once

#include "../kernels.h"

namespace nvfp4::cuda {

// Scattered results leave rows unwritten that only the device knows: this zeroes all of out.
// Without scatter it does nothing, as the kernels zero what is beyond the last offset.
void grouped_zero(const GroupedGemmParams& p, Stream stream);

// Any operands, both ragged modes. Zeroes rows that nobody writes, as every kernel here does.
void grouped_general(const GroupedGemmParams& p, Stream stream);

// Ragged M, packed weights with swizzled scales, a dense A, all aligned; weights are read once for
// up to `rows` rows of a group, at most 64.
bool grouped_small_m_weights(const GroupedGemmParams& p);  // all of that but A
bool grouped_small_m_takes(const GroupedGemmParams& p);
constexpr int64_t kGroupedSmallMMax = 64;
void grouped_small_m(const GroupedGemmParams& p, int64_t rows, Stream stream);

// The same operands on Hopper, in tiles of 64 rows of a group, or 128 where it has more than 64.
bool grouped_wgmma_available();
void grouped_wgmma(const GroupedGemmParams& p, int64_t rows, Stream stream);

}  // namespace nvfp4::cuda
