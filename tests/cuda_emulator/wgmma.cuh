// What the stand-ins for csrc/cuda/hopper.cuh have in common, in portable C++: named barriers,
// words and matrices in shared memory, wgmma. A wgmma happens at once. Included after ptx.cuh.
#pragma once

#include <cuda_runtime.h>

namespace emulator {
void sync_named(int id, int threads);
void arrive_named(int id, int threads);
}  // namespace emulator

namespace nvfp4::cuda {

inline void barrier_sync(int id, int threads) { emulator::sync_named(id, threads); }
inline void barrier_arrive(int id, int threads) { emulator::arrive_named(id, threads); }
inline void let_next_kernel_start() {}
inline void wait_for_kernel_ahead() {}
inline void fence_device() {}
inline uint32_t clock_ticks() {
  static uint32_t ticks = 0;
  return ticks += 1000;
}
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

inline uint32_t wgmma_descriptor_low(uint32_t address) { return address / 16; }
inline uint64_t wgmma_descriptor_of(uint32_t low) { return low; }

// The 16-bit value whose address, before the swizzle, is this.
template <typename T>
float shared_element(uint32_t address, T type) {
  address ^= (address >> 7 & 7) << 4;
  uint16_t bits;
  std::memcpy(&bits, dynamic_shared() + address, 2);
  return pair_element(bits, 0, type);
}

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
      sum +=
          double{left} * shared_element(static_cast<uint32_t>(b) * 16 + column * 128 + k * 2, type);
    }
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace nvfp4::cuda
