// csrc/cuda/hopper.cuh and cluster.cuh in portable C++, as far as the fused GEMMs use them; sets
// their guards. Included after ptx.cuh; a program brings what is declared here, mostly by
// shared_barriers.h.
//
// What is tested is layouts and barriers, not the order of what is asynchronous.
#define NVFP4_CUDA_HOPPER_CUH
#define NVFP4_CUDA_CLUSTER_CUH
#define NVFP4_WGMMA 1

#include "wgmma.cuh"

namespace emulator {
// Barriers in the shared memory of block `rank` of the cluster; bytes counts like in PTX.
void init_barrier(uint32_t address, int arrivals);
void arrive(int rank, uint32_t address, int bytes_expected);
void bytes_arrived(int rank, uint32_t address, int bytes);
void wait_barrier(uint32_t address, uint32_t parity);
int cluster_index();
}  // namespace emulator

namespace nvfp4::cuda {

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
inline void barrier_arrive_cluster(uint32_t barrier, int rank) {
  emulator::arrive(rank, barrier, 0);
}
inline void cluster_arrive_relaxed() {}
inline unsigned cluster_index() { return static_cast<unsigned>(emulator::cluster_index()); }
template <int kCount>
void store_cluster_async(uint32_t address, int rank, const float (&v)[kCount], uint32_t barrier) {
  if (address % sizeof(v)) std::abort();
  std::memcpy(emulator::shared_memory(rank) + address, v, sizeof(v));
  emulator::bytes_arrived(rank, barrier, sizeof(v));
}
inline void copy_cluster_async(uint32_t address, uint32_t source, uint32_t bytes, int rank,
                               uint32_t barrier) {
  if (rank == emulator::cluster_rank())
    std::abort();  // memcheck refuses a copy to the block itself
  if (address % 16 || source % 16 || bytes % 16) std::abort();
  std::memcpy(emulator::shared_memory(rank) + address, dynamic_shared() + source, bytes);
  emulator::bytes_arrived(rank, barrier, static_cast<int>(bytes));
}
// What others have counted may be seen late: here, every other eight looks.
inline unsigned load_acquire(const unsigned* p) {
  static unsigned looks = 0;
  return looks++ / 8 % 2 == 0 ? 0 : *p;
}
inline unsigned add_release_acquire(unsigned* p, unsigned v) { return atomicAdd(p, v); }
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
inline void fence_async_proxy() {}

inline void keep(uint32_t&) {}

inline uint64_t wgmma_descriptor(uint32_t address) { return address / 16; }

}  // namespace nvfp4::cuda
