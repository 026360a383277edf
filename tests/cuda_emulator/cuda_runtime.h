// Enough of the CUDA runtime for csrc/cuda/*.cu to compile with a C++ compiler and run on a CPU.
//
// A kernel's threads are fibers of one OS thread. Blocks run one after another, the blocks of a
// cluster together; a fiber gives way at barriers and warp-wide exchanges. Shared memory starts
// poisoned, and an asynchronous copy happens no sooner than it is waited for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __shared__ static  // blocks without a cluster run one at a time
#define __align__(n) __attribute__((aligned(n)))

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern dim3 threadIdx, blockIdx, gridDim;

using std::max;
using std::min;

inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}

namespace emulator {
constexpr int kWarp = 32;

// The current device. What is read of a device is kept by its index, so a test that changes the
// rest changes the index too.
struct Machine {
  int index = 0;
  int sm_count = 3;
  int cc_major = 9;
  int shared_per_sm = 228 * 1024, shared_per_block = 227 * 1024;
  enum Order { kForwards, kBackwards, kOddFirst } order = kForwards;  // of blocks, or clusters
  int early_starts = 0;  // launches that may start before the kernel ahead is over
};
extern Machine machine;

void sync_block();
void sync_cluster();
// Deposits 8 words, waits for the warp, and returns all lanes' deposits; valid until the next call.
struct Deposit {
  uint32_t word[8];
};
const Deposit* exchange(const Deposit& mine);
int lane();
int cluster_rank();
uint8_t* shared_memory(int rank);  // of this cluster's block `rank`
// `bytes` to shared memory, those from `valid` on as zeros.
void queue_copy(uint32_t target, const void* source, int bytes, int valid);
void commit_copies();
void wait_copies(int pending);
void launch(dim3 grid, dim3 block, int cluster, size_t shared_bytes,
            const std::function<void()>& thread);
}  // namespace emulator

inline void __syncthreads() { emulator::sync_block(); }
inline void __syncwarp() { emulator::exchange({}); }
inline void __threadfence() {}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
inline unsigned atomicExch(unsigned* p, unsigned v) {
  const unsigned before = *p;
  *p = v;
  return before;
}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
  const unsigned before = *p;
  *p += v;
  return before;
}
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  const auto* all = emulator::exchange({{__float_as_uint(v)}});
  return __uint_as_float(all[emulator::lane() ^ mask].word[0]);
}
inline float __shfl_sync(unsigned, float v, int source, int width) {
  const auto* all = emulator::exchange({{__float_as_uint(v)}});
  return __uint_as_float(all[emulator::lane() / width * width + source % width].word[0]);
}
inline uint32_t __shfl_sync(unsigned, uint32_t v, int source) {
  return emulator::exchange({{v}})[source].word[0];
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t v, int mask) {
  return emulator::exchange({{v}})[emulator::lane() ^ mask].word[0];
}
inline int __all_sync(unsigned, int predicate) {
  const auto* all = emulator::exchange({{predicate != 0}});
  return std::all_of(all, all + emulator::kWarp, [](const auto& d) { return d.word[0] != 0; });
}
inline uint32_t __ballot_sync(unsigned, int predicate) {
  const auto* all = emulator::exchange({{predicate != 0}});
  uint32_t bits = 0;
  for (int i = 0; i < emulator::kWarp; ++i) bits |= all[i].word[0] << i;
  return bits;
}
inline int __any_sync(unsigned, int predicate) {
  const auto* all = emulator::exchange({{predicate != 0}});
  return std::any_of(all, all + emulator::kWarp, [](const auto& d) { return d.word[0] != 0; });
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::machine.index;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const emulator::Machine& m = emulator::machine;
  const int values[] = {m.cc_major, 0, m.sm_count, m.shared_per_sm, m.shared_per_block};
  *value = values[which];
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaGetSymbolAddress(void** address, T& symbol) {
  *address = &symbol;
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int bytes) {
  return bytes <= emulator::machine.shared_per_block ? cudaSuccess : cudaErrorInvalidValue;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel, const cudaLaunchConfig_t* c) {
  *clusters = 2 * emulator::machine.sm_count / static_cast<int>(c->attrs->val.clusterDim.x);
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* c, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const bool grid_fits = c->gridDim.x > 0 && c->gridDim.x < (1u << 31) && c->gridDim.y > 0 &&
                         c->gridDim.y < 65536 && c->blockDim.x <= 1024;
  if (!grid_fits || c->dynamicSmemBytes > static_cast<size_t>(emulator::machine.shared_per_block)) {
    return cudaErrorInvalidValue;
  }
  int cluster = 1;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    if (c->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      cluster = static_cast<int>(c->attrs[i].val.clusterDim.x);
    }
    if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      ++emulator::machine.early_starts;
    }
  }
  if (c->gridDim.x % cluster != 0) return cudaErrorInvalidValue;
  const std::tuple<Parameters...> copy(arguments...);
  emulator::launch(c->gridDim, c->blockDim, cluster, c->dynamicSmemBytes,
                   [&] { std::apply(kernel, copy); });
  return cudaSuccess;
}
