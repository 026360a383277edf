// csrc/cuda/hopper.cuh and cluster.cuh in portable C++, as far as gemm_small_m_hopper.cu uses them;
// sets their guards. Included after cuda_emulator/ptx.cuh.
#define NVFP4_CUDA_HOPPER_CUH
#define NVFP4_CUDA_CLUSTER_CUH
#define NVFP4_WGMMA 1

#include <cuda_runtime.h>

struct cudaFuncAttributes {
  int numRegs;
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, Kernel) {
  found->numRegs = 128;
  return cudaSuccess;
}

namespace emulator {
// Barriers in the shared memory of block `rank` of the cluster; bytes count as in PTX.
void init_barrier(uint32_t address, int arrivals);
void arrive(uint32_t address, int bytes_expected);
void bytes_arrived(int rank, uint32_t address, int bytes);
void wait_barrier(uint32_t address, uint32_t parity);
int cluster_index();
}  // namespace emulator

namespace nvfp4::cuda {

inline void barrier_init(uint32_t barrier, int arrivals) {
  emulator::init_barrier(barrier, arrivals);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) { emulator::arrive(barrier, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulator::arrive(barrier, static_cast<int>(bytes));
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::wait_barrier(barrier, parity);
}
inline void cluster_arrive_relaxed() {}
inline unsigned cluster_index() { return static_cast<unsigned>(emulator::cluster_index()); }
inline void store_cluster_async(uint32_t address, int rank, float v, uint32_t barrier) {
  std::memcpy(emulator::shared_memory(rank) + address, &v, sizeof(v));
  emulator::bytes_arrived(rank, barrier, sizeof(v));
}
inline void let_next_kernel_start() {}
inline void wait_for_kernel_ahead() {}

}  // namespace nvfp4::cuda
