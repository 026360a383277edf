// csrc/cuda/hopper.cuh in portable C++; sets its guard. Included after cuda_emulator/ptx.cuh.
//
// What a barrier in shared memory counts arrives when its phase ends, not sooner.
#define NVFP4_CUDA_HOPPER_CUH
#define NVFP4_WGMMA 1

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "../cuda_emulator/wgmma.cuh"

namespace emulator {
void give_way();  // to other threads, perhaps several times
void init_counted(uint32_t barrier, int arrivals);
// At block `rank`'s barrier: `arrivals`, and `bytes` more to wait for.
void arrive_counted(uint32_t barrier, int rank, int arrivals, int64_t bytes);
void wait_counted(uint32_t barrier, uint32_t parity);
bool phase_over(uint32_t barrier, uint32_t parity);
// `copy` is done, and `bytes` have arrived, when block `rank`'s barrier gets that far.
void copy_counted(uint32_t barrier, int rank, int64_t bytes, std::function<void()> copy);
}  // namespace emulator

namespace nvfp4::cuda {

inline void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::init_counted(barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) {
  emulator::arrive_counted(barrier, emulator::cluster_rank(), 1, 0);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive_counted(barrier, emulator::cluster_rank(), 1, bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_counted(barrier, parity);
}

inline bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  emulator::give_way();
  return emulator::phase_over(barrier, parity);
}

template <bool kOnce = false>
inline void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) {
    fail("misaligned bulk copy");
  }
  const int rank = emulator::cluster_rank();
  emulator::copy_counted(barrier, rank, bytes, [=] {
    std::memcpy(emulator::shared_memory(rank) + target, source, bytes);
  });
}

inline void fence_async_proxy() {}
// Of a counter that begins at 0, and may be seen late.
inline unsigned load_acquire(const unsigned* p) {
  static std::minstd_rand late;
  emulator::give_way();
  return late() % 3 ? *p : 0;
}

// Of a counter that another kernel, which is under way, counts up.
inline std::function<void()> other_kernel;
inline unsigned load_relaxed(const unsigned* p) {
  emulator::give_way();
  if (other_kernel) other_kernel();
  return *p;
}

inline unsigned add_release_acquire(unsigned* p, unsigned v) {
  emulator::give_way();
  return atomicAdd(p, v);
}

inline void pin_register(uint32_t&) {}
inline void keep(uint32_t&) {}

inline void store_matrices_transposed(uint32_t address, const uint32_t (&words)[4]) {
  const auto* all = emulator::exchange({{address, words[0], words[1], words[2], words[3]}});
  const int row = emulator::lane() / 4, column = 2 * (emulator::lane() % 4);
  for (int i = 0; i < 4; ++i) {
    for (int c = 0; c < 2; ++c) {
      const uint32_t to = all[8 * i + column + c].word[0] + row * 2;
      const uint16_t value = static_cast<uint16_t>(words[i] >> (16 * c));
      std::memcpy(dynamic_shared() + to, &value, 2);
    }
  }
}

// Both sides in shared memory: a warp has rows 16 w ... of a.
template <int kCount, typename T>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, T type) {
  emulator::exchange({});  // all of a warp together
  const int first = static_cast<int>(threadIdx.x) / 32 % 4 * 16;
  const int group = emulator::lane() / 4, in_group = emulator::lane() % 4;
  for (int i = 0; i < kCount; ++i) {
    const uint32_t row = first + group + (i / 2 % 2) * 8;
    const uint32_t column = i / 4 * 8 + 2 * in_group + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      sum += double{shared_element(static_cast<uint32_t>(a) * 16 + row * 128 + k * 2, type)} *
             shared_element(static_cast<uint32_t>(b) * 16 + column * 128 + k * 2, type);
    }
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace nvfp4::cuda
