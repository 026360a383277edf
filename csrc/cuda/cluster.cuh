// Hopper's clusters beyond common.cuh's: one function each.
//
// Husks in code for other targets. As with ptx.cuh, a test that runs the kernels on a CPU sets the
// guard and brings its own.
#ifndef NVFP4_CUDA_CLUSTER_CUH
#define NVFP4_CUDA_CLUSTER_CUH

#include "hopper.cuh"

namespace nvfp4::cuda {

// cluster_arrive that lets others see nothing but initialized barriers.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if NVFP4_WGMMA
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// Which cluster of the grid.
__device__ __forceinline__ unsigned cluster_index() {
  unsigned index = 0;
#if NVFP4_WGMMA
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

// At the barrier in the same place of block `rank` of the cluster. Says that this thread is done
// reading, and no more: writes need not be visible there, which would cost a fence of all memory.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t barrier, int rank) {
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
#endif
}

// v to `address` of block `rank`'s shared memory, a multiple of v's bytes, which are counted on the
// barrier at `barrier` there.
__device__ __forceinline__ void store_cluster_async(uint32_t address, int rank, const float (&v)[2],
                                                    uint32_t barrier) {
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 counted, %4, %1;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [there], {%2, %3}, "
      "[counted];}" ::"r"(address),
      "r"(rank), "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void store_cluster_async(uint32_t address, int rank, const float (&v)[4],
                                                    uint32_t barrier) {
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mapa.shared::cluster.u32 counted, %6, %1;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%2, %3, %4, %5}, "
      "[counted];}" ::"r"(address),
      "r"(rank), "r"(__float_as_uint(v[0])), "r"(__float_as_uint(v[1])), "r"(__float_as_uint(v[2])),
      "r"(__float_as_uint(v[3])), "r"(barrier)
      : "memory");
#endif
}

// `bytes` (a multiple of 16, both ends 16-byte aligned) of this block's shared memory at `source`
// to `target` of block `rank`'s, counted on the barrier at `barrier` there.
__device__ __forceinline__ void copy_cluster_async(uint32_t target, uint32_t source, uint32_t bytes,
                                                   int rank, uint32_t barrier) {
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .u32 there, counted;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 counted, %4, %3;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %2, "
      "[counted];}" ::"r"(target),
      "r"(source), "r"(bytes), "r"(rank), "r"(barrier)
      : "memory");
#endif
}

}  // namespace nvfp4::cuda

#endif
