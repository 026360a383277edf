// silu(gate) * up on a GPU: when the fast form may be taken, and the plain one out of line.
#pragma once

#include "block_math.h"
#include "common.cuh"

namespace nvfp4::cuda {

// fast_silu may be used for all of these gates.
template <typename T, typename... More>
__device__ __forceinline__ bool is_fast_silu(const Raw8<T>& first, const More&... more) {
  bool fast = raw_abs_max(first, more...) <= kFastSiluMax;
  if constexpr (sizeof(T) == 2) {
    const Raw8<T> all[] = {first, more...};
    uint32_t exceptions = 0;
    for (const Raw8<T>& raw : all) {
      const uint4 w = raw.word[0];
      exceptions |= equal_pair(w.x, kFastSiluException, T{});
      exceptions |= equal_pair(w.y, kFastSiluException, T{});
      exceptions |= equal_pair(w.z, kFastSiluException, T{});
      exceptions |= equal_pair(w.w, kFastSiluException, T{});
    }
    fast = fast && exceptions == 0;
  }
  return fast;
}

template <typename T>
__device__ __forceinline__ float fast_swiglu(float gate, float up) {
  return fast_silu<sizeof(T) == 2>(gate) * up;
}

// An array that is passed by value: an address taken would keep it in local memory.
template <int kCount>
struct Values {
  float v[kCount];
};

// Out of line: rarely called, and a copy an element would crowd the loop.
template <int kCount>
__device__ __noinline__ Values<kCount> plain_swiglu(Values<kCount> gate, Values<kCount> up) {
  for (int i = 0; i < kCount; ++i) gate.v[i] = swiglu(gate.v[i], up.v[i]);
  return gate;
}

}  // namespace nvfp4::cuda
