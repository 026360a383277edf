// csrc/cuda/hopper.cuh in portable C++; sets its guard. Included after cuda_emulator/ptx.cuh.
//
// A wgmma happens at once: what is tested is layouts and barriers, not the order of what is
// asynchronous.
#define NVFP4_CUDA_HOPPER_CUH
#define NVFP4_WGMMA 1

#include <cuda_runtime.h>

struct cudaFuncAttributes {
  int numRegs;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  found->numRegs = 168;
  return cudaSuccess;
}

namespace emulator {
void sync_named(int id, int threads);
void arrive_named(int id, int threads);
}  // namespace emulator

namespace nvfp4::cuda {

inline void barrier_sync(int id, int threads) { emulator::sync_named(id, threads); }
inline void barrier_arrive(int id, int threads) { emulator::arrive_named(id, threads); }
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

inline uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  std::memcpy(&v, dynamic_shared() + address, sizeof(v));
  return v;
}

inline void load_matrices(uint32_t (&out)[4], uint32_t address) {
  const auto* all = emulator::exchange({{address}});
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = all[8 * i + emulator::lane() / 4].word[0];
    std::memcpy(&out[i], dynamic_shared() + row + emulator::lane() % 4 * 4, 4);
  }
}

inline uint64_t wgmma_descriptor(uint32_t address) { return address; }

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
      uint32_t address = static_cast<uint32_t>(b) + column * 128 + k * 2;
      address ^= (address >> 7 & 7) << 4;
      uint16_t bits;
      std::memcpy(&bits, dynamic_shared() + address, 2);
      sum += double{left} * pair_element(bits, 0, type);
    }
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace nvfp4::cuda
