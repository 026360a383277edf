// Every PTX instruction the kernels use by name, one function each.
//
// tests/cuda_emulator has the same functions in portable C++, so that the kernels' own text runs on
// a CPU: nothing else in csrc/cuda may contain asm (block_math.h, which is host code too, apart).
#ifndef NVFP4_CUDA_PTX_CUH  // a guard that the emulator can set
#define NVFP4_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "../nvfp4.h"

namespace nvfp4::cuda {

// --------------------------------------------------------------------------------- arithmetic

// prmt: selector nibble i picks byte i of the result among a's four bytes and b's; bit 3 of a
// nibble repeats that byte's top bit instead.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// The bits of a where mask has ones, else those of b: one instruction, which the compiler would
// take apart where it knows that some of them are masked away later.
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
  return r;
}

// v >> shift; 0 where shift is 32 or more, which the language leaves open.
__device__ __forceinline__ uint32_t shift_right(uint32_t v, uint32_t shift) {
  uint32_t r;
  asm("shr.u32 %0, %1, %2;" : "=r"(r) : "r"(v), "r"(shift));
  return r;
}

// max that a NaN operand turns into NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// max(|a|, |b|) half by half, NaN where either is NaN; the sign of the result is arbitrary.
__device__ __forceinline__ uint32_t max_abs_pair(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t r;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  asm("{.reg .b32 x, y;\n abs.bf16x2 x, %1;\n abs.bf16x2 y, %2;\n max.NaN.bf16x2 %0, x, y;}"
      : "=r"(r)
      : "r"(a), "r"(b));
#endif
  return r;
}
__device__ __forceinline__ uint32_t max_abs_pair(uint32_t a, uint32_t b, __half) {
  uint32_t r;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
  asm("{.reg .b32 x, y;\n abs.f16x2 x, %1;\n abs.f16x2 y, %2;\n max.NaN.f16x2 %0, x, y;}"
      : "=r"(r)
      : "r"(a), "r"(b));
#endif
  return r;
}

// All ones in each half that equals v, zeros elsewhere; T holds v exactly, and v is not 0.
__device__ __forceinline__ uint32_t equal_pair(uint32_t pair, float v, __nv_bfloat16) {
  uint32_t r, both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(both) : "f"(v));
#if __CUDA_ARCH__ >= 900
  asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(both));
#else
  r = __vcmpeq2(pair, both);
#endif
  return r;
}
__device__ __forceinline__ uint32_t equal_pair(uint32_t pair, float v, __half) {
  uint32_t r;
  asm("{.reg .b32 c;\n cvt.rn.f16x2.f32 c, %2, %2;\n set.eq.u32.f16x2 %0, %1, c;}"
      : "=r"(r)
      : "r"(pair), "f"(v));
  return r;
}

// a * b, half by half.
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t r;
  // fma with -0: BF16 has no plain multiply below sm_90.
  asm("{.reg .b32 z;\n mov.b32 z, 0x80008000;\n fma.rn.bf16x2 %0, %1, %2, z;}"
      : "=r"(r)
      : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b, __half) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// low and high rounded to T, low in bits 0..15. No canonical NaN.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// The low or the high half of a pair, twice: nothing where a multiplication reads it so.
__device__ __forceinline__ uint32_t both_low(uint32_t pair) {
  uint32_t r;
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};}"
      : "=r"(r)
      : "r"(pair));
  return r;
}
__device__ __forceinline__ uint32_t both_high(uint32_t pair) {
  uint32_t r;
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};}"
      : "=r"(r)
      : "r"(pair));
  return r;
}

// Two E4M3 codes in bits 0..15 as a pair of FP16, exactly; a NaN stays one.
__device__ __forceinline__ uint32_t e4m3_to_half_pair(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(r)
      : "r"(two));
  return r;
#else
  return round_pair<__half>(e4m3_to_float(static_cast<uint8_t>(two)),
                            e4m3_to_float(static_cast<uint8_t>(two >> 8)));
#endif
}

// c (16 x 8) += a (16 x 16) b (16 x 8), FP32 sums.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -------------------------------------------------------------------------------------- memory

// Read once: past L1.
__device__ __forceinline__ uint4 load_streaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Kept in L1, for the neighbours that read the rest of the sectors.
__device__ __forceinline__ uint4 load_cached(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Kept in L1 too, and before a barrier that follows: the compiler moves what it knows to be
// read-only to where it is used.
__device__ __forceinline__ uint4 load_vector_before(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_pair_before(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_byte_before(const void* p) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_half_before(const void* p) {
  uint16_t v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

// The block's dynamic shared memory.
__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ __align__(128) uint8_t memory[];
  return memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory, asynchronously; those from `valid` on as zeros. `source` is 16-byte
// aligned and not read where valid is 0.
__device__ __forceinline__ void copy_async(uint32_t target, const void* source, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid)
               : "memory");
}

// The same of 4 bytes, 4-byte aligned.
__device__ __forceinline__ void copy_async_word(uint32_t target, const void* source, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(valid)
               : "memory");
}

// copy_async, and L2 fetches the 256 bytes around `source`: for who reads on along a row.
__device__ __forceinline__ void copy_async_ahead(uint32_t target, const void* source, int valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(valid)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most `pending` groups of this thread's copies are under way. pending <= 4.
__device__ __forceinline__ void wait_copies(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 4;" ::: "memory");
      break;
  }
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// ------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
#endif
}

// cluster_sync in two halves: what comes between need not wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// v to `address` of block `rank`'s shared memory.
__device__ __forceinline__ void store_cluster(uint32_t address, int rank, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f32 [remote], %2;}" ::"r"(address),
      "r"(rank), "f"(v)
      : "memory");
#else
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
#endif
}

// The float at `address` of block `rank`'s shared memory.
__device__ __forceinline__ float load_cluster(uint32_t address, int rank) {
  float v = 0.0f;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];}"
      : "=f"(v)
      : "r"(address), "r"(rank)
      : "memory");
#endif
  return v;
}

}  // namespace nvfp4::cuda

#endif
