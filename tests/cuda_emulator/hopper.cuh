// csrc/cuda/hopper.cuh and cluster.cuh in portable C++, as far as the fused GEMMs use them; sets
// their guards. Included after ptx.cuh; a program brings what is declared here, mostly by
// shared_barriers.h.
//
// A wgmma happens at once: what is tested is layouts and barriers, not the order of what is
// asynchronous.
#define NVFP4_CUDA_HOPPER_CUH
#define NVFP4_CUDA_CLUSTER_CUH
#define NVFP4_WGMMA 1

#include <cuda_runtime.h>

namespace emulator {
void sync_named(int id, int threads);
void arrive_named(int id, int threads);
// Barriers in the shared memory of block `rank` of the cluster; bytes counts like in PTX.
void init_barrier(uint32_t address, int arrivals);
void arrive(int rank, uint32_t address, int bytes_expected);
void bytes_arrived(int rank, uint32_t address, int bytes);
void wait_barrier(uint32_t address, uint32_t parity);
int cluster_index();
}  // namespace emulator

namespace nvfp4::cuda {

inline void barrier_sync(int id, int threads) { emulator::sync_named(id, threads); }
inline void barrier_arrive(int id, int threads) { emulator::arrive_named(id, threads); }
inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) { emulator::arrive(cluster_rank(), barrier, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive(cluster_rank(), barrier, static_cast<int>(bytes));
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_barrier(barrier, parity);
}
// At once: the earliest that the hardware may.
inline void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  std::memcpy(dynamic_shared() + target, source, bytes);
  emulator::bytes_arrived(cluster_rank(), barrier, static_cast<int>(bytes));
}
inline void cluster_arrive_relaxed() {}
inline unsigned cluster_index() { return static_cast<unsigned>(emulator::cluster_index()); }
template <int kCount>
void store_cluster_async(uint32_t address, int rank, const float (&v)[kCount], uint32_t barrier) {
  if (address % sizeof(v)) std::abort();
  std::memcpy(emulator::shared_memory(rank) + address, v, sizeof(v));
  emulator::bytes_arrived(rank, barrier, sizeof(v));
}
inline void fence_device() {}
inline void let_next_kernel_start() {}
inline void wait_for_kernel_ahead() {}
// What others have counted may be seen late: here, every other eight looks.
inline unsigned load_acquire(const unsigned* p) {
  static unsigned looks = 0;
  return looks++ / 8 % 2 == 0 ? 0 : *p;
}
inline uint32_t transpose_matrix(uint32_t pair) {
  const auto* all = emulator::exchange({{pair}});
  const int row = emulator::lane() / 4, column = 2 * (emulator::lane() % 4);
  uint32_t out = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t from = all[(column + i) * 4 + row / 2].word[0];
    out |= (from >> (16 * (row % 2)) & 0xFFFF) << (16 * i);
  }
  return out;
}
inline void fence_shared_for_wgmma() {}
template <int>
void take_registers() {}
template <int>
void give_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int>
void wgmma_wait() {}
template <int kCount>
void pin_registers(float (&)[kCount]) {}

inline void keep(uint32_t&) {}

inline uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  std::memcpy(&v, dynamic_shared() + address, sizeof(v));
  return v;
}

inline void store_shared_word(uint32_t address, uint32_t v) {
  std::memcpy(dynamic_shared() + address, &v, sizeof(v));
}

inline void load_matrices(uint32_t (&out)[4], uint32_t address) {
  const auto* all = emulator::exchange({{address}});
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = all[8 * i + emulator::lane() / 4].word[0];
    std::memcpy(&out[i], dynamic_shared() + row + emulator::lane() % 4 * 4, 4);
  }
}

inline uint64_t wgmma_descriptor(uint32_t address) { return address / 16; }
inline uint32_t wgmma_descriptor_low(uint32_t address) { return address / 16; }
inline uint64_t wgmma_descriptor_of(uint32_t low) { return low; }

// The hardware's address of k vector `v` (16 bytes) of row n: bits 6..4 exclusive-ored with bits
// 9..7, of the address itself.
template <int kCount, typename T>
void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, T type) {
  const auto* all = emulator::exchange({{a[0], a[1], a[2], a[3]}});
  const int group = emulator::lane() / 4, in_group = emulator::lane() % 4;
  for (int i = 0; i < kCount; ++i) {
    const int row = group + (i / 2 % 2) * 8, column = i / 4 * 8 + 2 * in_group + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      const int lane = row % 8 * 4 + k % 8 / 2;
      const float left = pair_element(all[lane].word[(row >= 8) + (k >= 8) * 2], k % 2, type);
      uint32_t address = static_cast<uint32_t>(b) * 16 + column * 128 + k * 2;
      address ^= (address >> 7 & 7) << 4;
      uint16_t bits;
      std::memcpy(&bits, dynamic_shared() + address, 2);
      sum += double{left} * pair_element(bits, 0, type);
    }
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace nvfp4::cuda
