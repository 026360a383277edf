// What the grouped kernels for Hopper share: a barrier for a schedule's threads, a place in a ring
// of stages, and an exchange among four lanes.
#pragma once

#include "common.cuh"
#include "hopper.cuh"

namespace nvfp4::cuda {

template <int kId, int kCount>
struct NamedBarrier {
  __device__ __forceinline__ static void sync() { barrier_sync(kId, kCount); }
};

// A place in a ring of kCount stages, and the parity of its phase.
template <int kCount>
struct Place {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage < kCount) return;
    stage = 0;
    parity ^= 1;
  }
};

// words[j] of the lane with number t becomes words[t] of the one with number j, among four lanes
// kDistance apart.
template <int kDistance>
__device__ __forceinline__ void transpose_four(uint32_t (&words)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  const uint32_t x = __shfl_xor_sync(kFullWarp, odd ? words[0] : words[1], kDistance);
  const uint32_t y = __shfl_xor_sync(kFullWarp, odd ? words[2] : words[3], kDistance);
  (odd ? words[0] : words[1]) = x;
  (odd ? words[2] : words[3]) = y;
  const uint32_t z = __shfl_xor_sync(kFullWarp, high ? words[0] : words[2], 2 * kDistance);
  const uint32_t w = __shfl_xor_sync(kFullWarp, high ? words[1] : words[3], 2 * kDistance);
  (high ? words[0] : words[2]) = z;
  (high ? words[1] : words[3]) = w;
}

}  // namespace nvfp4::cuda
