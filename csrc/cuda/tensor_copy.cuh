// Hopper's copies by descriptor: boxes of a matrix in memory to shared memory, to one block's or to
// several of a cluster.
//
// As with ptx.cuh, a test that runs the kernels on a CPU sets the guard and brings its own.
#ifndef NVFP4_CUDA_TENSOR_COPY_CUH
#define NVFP4_CUDA_TENSOR_COPY_CUH

#include <cuda.h>  // types: the driver is asked for its functions at run time

#include <cstdint>

#include "cluster.cuh"

namespace nvfp4::cuda {

constexpr int kBoxBytes = 128;  // of a row

// Describes boxes of `box_rows` rows x kBoxBytes of a row-major matrix of bytes or 16-bit values.
// In shared memory a box is what wgmma's descriptors say: rows of 128 bytes, their 16-byte vectors
// exclusive-ored with row % 8. What is outside the matrix arrives as zeros.
// `data` and `row_bytes` are multiples of 16.
// once: boxes are, with copy_box<true>, so that no copy should bring its neighbour's bytes to L2.
CUtensorMap tensor_map(const void* data, int element_bytes, int64_t rows, int64_t columns,
                       int64_t row_bytes, int box_rows, bool once = false);

// The box whose first element is (row, column); `target` is a multiple of 1024 bytes. Its bytes,
// those outside the matrix too, are counted on `barrier`. kOnce: nobody reads it again, so that it
// leaves L2 before what is read again, instructions among it.
template <bool kOnce = false>
__device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap& map, int column,
                                         int row, uint32_t barrier) {
#if NVFP4_WGMMA
  if constexpr (kOnce) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
  }
#endif
}

// Brings the description near, for the first copy.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
#if NVFP4_WGMMA
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// The same to the same place of every block of the cluster in `blocks`, counted on each one's
// barrier.
__device__ __forceinline__ void copy_box_to(uint32_t blocks, uint32_t target,
                                            const CUtensorMap& map, int column, int row,
                                            uint32_t barrier) {
#if NVFP4_WGMMA
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
#endif
}

}  // namespace nvfp4::cuda

#endif
