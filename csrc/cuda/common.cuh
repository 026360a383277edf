// What the CUDA kernels share: launch checks, scalars, typed loads and stores, NaN bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels.h"
#include "../nvfp4.h"
#include "ptx.cuh"

namespace nvfp4::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + " failed: " + cudaGetErrorName(status) + " (" +
                             cudaGetErrorString(status) + ")");
  }
}

inline cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream); }

// Launches `kernel` and throws where that fails; `name` is for the message.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, Stream stream,
            Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = as_stream(stream);
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

// The same for a kernel that calls wait_for_kernel_ahead() before it touches memory: on Hopper it
// starts while the kernel ahead of it ends, and its launch takes the host less.
template <typename... Parameters, typename... Arguments>
void launch_behind(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                   Stream stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = as_stream(stream);
#if defined(NVFP4_WITH_HOPPER)  // code for other targets does not wait
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &behind;
  config.numAttrs = current_device().cc_major == 9 ? 1 : 0;
#endif
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

inline bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

inline int64_t size_of(DType type) { return type == DType::kFloat32 ? 4 : 2; }

// Calls f with a null pointer of the C++ type that `type` stands for.
template <typename F>
void dispatch(DType type, F&& f) {
  switch (type) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<__half*>(nullptr));
  }
}

__device__ __forceinline__ float load_scalar(const Scalar& s) {
  return s.device ? *s.device : s.value;
}

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

// One rounding, nearest even; a NaN becomes the canonical one.
template <typename T>
__device__ __forceinline__ T from_float(float v);

template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v != v ? float_from_bits(kNanFloat32) : v;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return v != v ? __ushort_as_bfloat16(kNanBFloat16) : __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return v != v ? __ushort_as_half(kNanFloat16) : __float2half_rn(v);
}

// v, rounded once, to element `index` of an array of that type.
__device__ __forceinline__ void store_one(void* out, DType type, int64_t index, float v) {
  switch (type) {
    case DType::kFloat32:
      static_cast<float*>(out)[index] = from_float<float>(v);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(out)[index] = from_float<__nv_bfloat16>(v);
      break;
    default:
      static_cast<__half*>(out)[index] = from_float<__half>(v);
  }
}

// An element of a vector whose type only the host's argument knows (bias).
__device__ __forceinline__ float load_as_float(const void* base, DType type, int64_t index) {
  switch (type) {
    case DType::kFloat32:
      return static_cast<const float*>(base)[index];
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(base)[index]);
    default:
      return to_float(static_cast<const __half*>(base)[index]);
  }
}

// Eight consecutive elements of T, as loaded.
template <typename T>
struct Raw8 {
  static constexpr int kWords = sizeof(T) == 4 ? 2 : 1;
  uint4 word[kWords];
};

// kAligned: p is 16-byte aligned; else p has T's alignment.
template <bool kAligned, typename T>
__device__ __forceinline__ Raw8<T> load8(const T* p) {
  Raw8<T> raw;
  if constexpr (kAligned) {
    for (int i = 0; i < Raw8<T>::kWords; ++i) {
      raw.word[i] = load_streaming(reinterpret_cast<const uint4*>(p) + i);
    }
  } else if constexpr (sizeof(T) == 4) {
    const uint32_t* q = reinterpret_cast<const uint32_t*>(p);
    raw.word[0] = make_uint4(q[0], q[1], q[2], q[3]);
    raw.word[1] = make_uint4(q[4], q[5], q[6], q[7]);
  } else {
    const uint16_t* q = reinterpret_cast<const uint16_t*>(p);
    raw.word[0] = make_uint4(q[0] | uint32_t{q[1]} << 16, q[2] | uint32_t{q[3]} << 16,
                             q[4] | uint32_t{q[5]} << 16, q[6] | uint32_t{q[7]} << 16);
  }
  return raw;
}

template <typename T>
__device__ __forceinline__ Raw8<T> zero8() {
  Raw8<T> raw;
  for (int i = 0; i < Raw8<T>::kWords; ++i) raw.word[i] = make_uint4(0, 0, 0, 0);
  return raw;
}

__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high, __nv_bfloat16) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xFFFF0000u);
}
__device__ __forceinline__ void widen_pair(uint32_t pair, float& low, float& high, __half) {
  low = __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFFu)));
  high = __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}

template <typename T>
__device__ __forceinline__ void widen(const Raw8<T>& raw, float (&out)[8]) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t w[8] = {raw.word[0].x, raw.word[0].y, raw.word[0].z, raw.word[0].w,
                           raw.word[1].x, raw.word[1].y, raw.word[1].z, raw.word[1].w};
    for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(w[i]);
  } else {
    const uint32_t w[4] = {raw.word[0].x, raw.word[0].y, raw.word[0].z, raw.word[0].w};
    for (int i = 0; i < 4; ++i) widen_pair(w[i], out[2 * i], out[2 * i + 1], T{});
  }
}

__device__ __forceinline__ float abs_max8(const float (&v)[8]) {
  float m = fabsf(v[0]);
  for (int i = 1; i < 8; ++i) m = max_nan(m, fabsf(v[i]));
  return m;
}

// The largest magnitude of all of them; NaN where an element is NaN.
template <typename T, typename... More>
__device__ __forceinline__ float raw_abs_max(const Raw8<T>& first, const More&... more) {
  const Raw8<T> all[] = {first, more...};
  if constexpr (sizeof(T) == 4) {
    float m = 0.0f;
    for (const Raw8<T>& raw : all) {
      float v[8];
      widen(raw, v);
      m = max_nan(m, abs_max8(v));
    }
    return m;
  } else {
    uint32_t m = 0;
    for (const Raw8<T>& raw : all) {
      const uint4 w = raw.word[0];
      m = max_abs_pair(
          m, max_abs_pair(max_abs_pair(w.x, w.y, T{}), max_abs_pair(w.z, w.w, T{}), T{}), T{});
    }
    float low, high;
    widen_pair(m, low, high, T{});
    return max_nan(fabsf(low), fabsf(high));
  }
}

__device__ __forceinline__ float finite_abs_max8(const float (&v)[8]) {
  float m = 0.0f;
  for (int i = 0; i < 8; ++i) m = is_finite(v[i]) ? fmaxf(m, fabsf(v[i])) : m;
  return m;
}

}  // namespace nvfp4::cuda
