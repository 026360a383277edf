// Hopper's instructions: barriers in shared memory, bulk copies, warpgroup products, and the named
// barriers and ldmatrix that go with them; one function each.
//
// Husks in code for other targets. As with ptx.cuh, a test that runs the kernels on a CPU sets the
// guard and brings its own.
#ifndef NVFP4_CUDA_HOPPER_CUH
#define NVFP4_CUDA_HOPPER_CUH

#include "ptx.cuh"

// Only code for sm_90a has them.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define NVFP4_WGMMA 1
#else
#define NVFP4_WGMMA 0
#endif

namespace nvfp4::cuda {

// ------------------------------------------------------------------------------- named barriers

// Waits for `threads` threads to have come to barrier `id`, by sync or by arrive.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -------------------------------------------------------- barriers in shared memory, bulk copies

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
#if NVFP4_WGMMA
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}

// Makes a thread's barrier_init known to the copies it starts.
__device__ __forceinline__ void fence_barrier_init() {
#if NVFP4_WGMMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if NVFP4_WGMMA
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Arrives, and lets the phase wait for `bytes` of bulk copies too.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if NVFP4_WGMMA
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Whether it is, or is soon.
__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 1;
#if NVFP4_WGMMA
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done;
}

// How L2 keeps what is read once: not for long.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy = 0;
#if NVFP4_WGMMA
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// `bytes` (a multiple of 16, both ends 16-byte aligned) to shared memory; counted on `barrier`.
template <bool kOnce = false>
__device__ __forceinline__ void copy_bulk(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
#if NVFP4_WGMMA
  if constexpr (kOnce) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(evict_first())
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
  }
#endif
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// Four 8 x 8 matrices of 16-bit values. Lane l gives the address of row l % 8 of matrix l / 8, 16
// bytes, and gets values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// Stores the transposes of four 8 x 8 matrices: lane l has values 2 (l % 4) and 2 (l % 4) + 1 of
// row l / 4 of each, and gives the address of row l % 8 of the transpose of matrix l / 8, 16 bytes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address,
                                                          const uint32_t (&words)[4]) {
#if NVFP4_WGMMA
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
#endif
}

// Lane l holds values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of an 8 x 8 matrix of 16-bit values,
// and gets the same of its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// ------------------------------------------------------------------ kernels that follow each other

// The kernel behind this one, if launched for it, may start: all it may not do is in its wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if NVFP4_WGMMA
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the kernel ahead is over and its writes are visible.
__device__ __forceinline__ void wait_for_kernel_ahead() {
#if NVFP4_WGMMA
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Cycles of this multiprocessor, modulo 2^32.
__device__ __forceinline__ uint32_t clock_ticks() {
  uint32_t ticks;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(ticks)::"memory");
  return ticks;
}

// What came before this, anywhere on the device and seen by this thread, is before what comes
// after.
__device__ __forceinline__ void fence_device() {
#if NVFP4_WGMMA
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}
// What this thread sees of memory, copies that it starts see too.
__device__ __forceinline__ void fence_async_proxy() {
#if NVFP4_WGMMA
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}
__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned v = 0;
#if NVFP4_WGMMA
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
  return v;
}
// What came before the value was there only after fence_device().
__device__ __forceinline__ unsigned load_relaxed(const unsigned* p) {
  unsigned v = 0;
#if NVFP4_WGMMA
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
  return v;
}
// Adds, and gives what was there. What came before this is there for whoever sees the sum, and what
// those saw whose sums this one sees is there after.
__device__ __forceinline__ unsigned add_release_acquire(unsigned* p, unsigned v) {
  unsigned before = 0;
#if NVFP4_WGMMA
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(p), "r"(v)
               : "memory");
#endif
  return before;
}

// ----------------------------------------------------------------------------------- warpgroups

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if NVFP4_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if NVFP4_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// This thread's ordinary writes to shared memory are there for wgmma, of whoever hears of it.
__device__ __forceinline__ void fence_shared_for_wgmma() {
#if NVFP4_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Before the first wgmma, and between ordinary writes of its registers and the next one.
__device__ __forceinline__ void wgmma_fence() {
#if NVFP4_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if NVFP4_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#if NVFP4_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Keeps the compiler from moving what reads or writes these registers across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// And what is computed from this one.
__device__ __forceinline__ void pin_register(uint32_t& v) { asm volatile("" : "+r"(v)::"memory"); }
// Keeps a value in a register that the compiler would rather compute anew each time.
__device__ __forceinline__ void keep(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Rows of 64 16-bit values along k, 128 bytes apart, 16-byte vectors exclusive-ored with row % 8;
// the rows' start is a multiple of 1024 bytes, `address` is there or 32 i bytes further along k.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (address & 0x3FFFF) >> 4;
}

// The same in parts: the half that changes with the address, where 16 bytes are 1, and the whole.
__device__ __forceinline__ uint32_t wgmma_descriptor_low(uint32_t address) {
  return static_cast<uint32_t>(wgmma_descriptor(address));
}
__device__ __forceinline__ uint64_t wgmma_descriptor_of(uint32_t low) {
  return wgmma_descriptor(0) >> 32 << 32 | low;
}

// d (64 x N) += a (64 x 16, in registers) b (N x 16, in shared memory)^T, N = 2 kCount. The
// fragments are those of mma.m16n8k16, warp w of the warpgroup having rows 16 w ...
// clang-format off
#define NVFP4_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NVFP4_D8(i) NVFP4_D4(i), NVFP4_D4(i + 4)
#define NVFP4_D24(i) NVFP4_D8(i), NVFP4_D8(i + 8), NVFP4_D8(i + 16)
#define NVFP4_D32(i) NVFP4_D8(i), NVFP4_D8(i + 8), NVFP4_D8(i + 16), NVFP4_D8(i + 24)
#define NVFP4_NAMES4 "%0,%1,%2,%3"
#define NVFP4_NAMES8 NVFP4_NAMES4 ",%4,%5,%6,%7"
#define NVFP4_NAMES16 NVFP4_NAMES8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NVFP4_NAMES24 NVFP4_NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define NVFP4_NAMES32 NVFP4_NAMES16 \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NVFP4_NAMES64 NVFP4_NAMES32 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NVFP4_NAMES96 NVFP4_NAMES64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NVFP4_NAMES128 NVFP4_NAMES96 \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// The function for `count` sums a thread; `names` stands for them, `rest` for a, b and the flags.
#define NVFP4_WGMMA_FUNCTION(count, shape, type, ptx_type, names, rest, ...)                    \
  __device__ __forceinline__ void wgmma(float (&d)[count], const uint32_t (&a)[4], uint64_t b, \
                                        type) {                                                 \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." ptx_type "." ptx_type            \
                 " {" names "}, " rest ", 1, 1, 1, 0;"                                          \
                 : __VA_ARGS__                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                         \
  }
// The same with a in shared memory too, by descriptor.
#define NVFP4_WGMMA_SHARED(count, shape, type, ptx_type, names, rest, ...)                    \
  __device__ __forceinline__ void wgmma(float (&d)[count], uint64_t a, uint64_t b, type) {   \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." ptx_type "." ptx_type          \
                 " {" names "}, " rest ", 1, 1, 1, 0, 0;"                                     \
                 : __VA_ARGS__                                                                \
                 : "l"(a), "l"(b));                                                           \
  }
#define NVFP4_WGMMA_TYPES(count, shape, names, rest, ...)                                   \
  NVFP4_WGMMA_FUNCTION(count, shape, __nv_bfloat16, "bf16", names, rest, __VA_ARGS__) \
  NVFP4_WGMMA_FUNCTION(count, shape, __half, "f16", names, rest, __VA_ARGS__)

#if NVFP4_WGMMA
NVFP4_WGMMA_TYPES(4, "m64n8k16", NVFP4_NAMES4, "{%4,%5,%6,%7}, %8", NVFP4_D4(0))
NVFP4_WGMMA_TYPES(8, "m64n16k16", NVFP4_NAMES8, "{%8,%9,%10,%11}, %12", NVFP4_D8(0))
NVFP4_WGMMA_TYPES(16, "m64n32k16", NVFP4_NAMES16, "{%16,%17,%18,%19}, %20",
                  NVFP4_D8(0), NVFP4_D8(8))
NVFP4_WGMMA_TYPES(24, "m64n48k16", NVFP4_NAMES24, "{%24,%25,%26,%27}, %28", NVFP4_D24(0))
NVFP4_WGMMA_TYPES(32, "m64n64k16", NVFP4_NAMES32, "{%32,%33,%34,%35}, %36", NVFP4_D32(0))
NVFP4_WGMMA_TYPES(64, "m64n128k16", NVFP4_NAMES64, "{%64,%65,%66,%67}, %68",
                  NVFP4_D32(0), NVFP4_D32(32))
NVFP4_WGMMA_SHARED(32, "m64n64k16", __nv_bfloat16, "bf16", NVFP4_NAMES32, "%32, %33", NVFP4_D32(0))
NVFP4_WGMMA_SHARED(32, "m64n64k16", __half, "f16", NVFP4_NAMES32, "%32, %33", NVFP4_D32(0))
NVFP4_WGMMA_SHARED(128, "m64n256k16", __nv_bfloat16, "bf16", NVFP4_NAMES128, "%128, %129",
                   NVFP4_D32(0), NVFP4_D32(32), NVFP4_D32(64), NVFP4_D32(96))
NVFP4_WGMMA_SHARED(128, "m64n256k16", __half, "f16", NVFP4_NAMES128, "%128, %129",
                   NVFP4_D32(0), NVFP4_D32(32), NVFP4_D32(64), NVFP4_D32(96))
NVFP4_WGMMA_TYPES(96, "m64n192k16", NVFP4_NAMES96, "{%96,%97,%98,%99}, %100",
                  NVFP4_D32(0), NVFP4_D32(32), NVFP4_D32(64))
NVFP4_WGMMA_TYPES(128, "m64n256k16", NVFP4_NAMES128, "{%128,%129,%130,%131}, %132",
                  NVFP4_D32(0), NVFP4_D32(32), NVFP4_D32(64), NVFP4_D32(96))
#else
template <int kCount, typename T>
__device__ __forceinline__ void wgmma(float (&)[kCount], const uint32_t (&)[4], uint64_t, T) {}
template <int kCount, typename T>
__device__ __forceinline__ void wgmma(float (&)[kCount], uint64_t, uint64_t, T) {}
#endif
#undef NVFP4_WGMMA_TYPES
#undef NVFP4_WGMMA_SHARED
#undef NVFP4_WGMMA_FUNCTION
#undef NVFP4_NAMES128
#undef NVFP4_NAMES96
#undef NVFP4_NAMES64
#undef NVFP4_NAMES32
#undef NVFP4_NAMES24
#undef NVFP4_NAMES16
#undef NVFP4_NAMES8
#undef NVFP4_NAMES4
#undef NVFP4_D32
#undef NVFP4_D24
#undef NVFP4_D8
#undef NVFP4_D4
// clang-format on

}  // namespace nvfp4::cuda

#endif
