// csrc/cuda/ptx.cuh in portable C++. Included ahead of every kernel file; sets the other's guard.
#define NVFP4_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../nvfp4.h"

namespace nvfp4::cuda {

inline uint32_t both_low(uint32_t pair) { return (pair & 0xFFFF) * 0x10001u; }
inline uint32_t both_high(uint32_t pair) { return (pair >> 16) * 0x10001u; }
inline uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  return (a & mask) | (b & ~mask);
}
inline uint32_t shift_right(uint32_t v, uint32_t shift) { return shift < 32 ? v >> shift : 0; }
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | uint64_t{b} << 32;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = (selector >> (4 * i)) & 0xFu;
    uint32_t byte = (bytes >> (8 * (pick & 7u))) & 0xFFu;
    if (pick & 8u) byte = byte & 0x80u ? 0xFFu : 0x00u;
    r |= byte << (8 * i);
  }
  return r;
}

inline float max_nan(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7FFFFFFFu);
  return a > b ? a : b;
}

inline float pair_element(uint32_t bits, int i, __nv_bfloat16) {
  return __bfloat162float(__ushort_as_bfloat16(static_cast<unsigned short>(bits >> (16 * i))));
}
inline float pair_element(uint32_t bits, int i, __half) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> (16 * i))));
}
inline uint32_t narrow(float v, __nv_bfloat16) { return __float2bfloat16_rn(v).x; }
inline uint32_t narrow(float v, __half) { return __float2half_rn(v).x; }

template <typename T>
uint32_t max_abs_pair(uint32_t a, uint32_t b, T type) {
  uint32_t r = 0;
  for (int i = 0; i < 2; ++i) {
    const float m =
        max_nan(std::fabs(pair_element(a, i, type)), std::fabs(pair_element(b, i, type)));
    r |= narrow(m, type) << (16 * i);
  }
  return r;
}

template <typename T>
uint32_t equal_pair(uint32_t pair, float v, T type) {
  uint32_t r = 0;
  for (int i = 0; i < 2; ++i) {
    if (pair_element(pair, i, type) == v) r |= 0xFFFFu << (16 * i);
  }
  return r;
}

template <typename T>
uint32_t multiply_pair(uint32_t a, uint32_t b, T type) {
  uint32_t r = 0;
  for (int i = 0; i < 2; ++i) {
    r |= narrow(pair_element(a, i, type) * pair_element(b, i, type), type) << (16 * i);
  }
  return r;
}

template <typename T>
uint32_t round_pair(float low, float high) {
  return narrow(low, T{}) | narrow(high, T{}) << 16;
}

inline uint32_t e4m3_to_half_pair(uint32_t two) {
  return round_pair<__half>(e4m3_to_float(static_cast<uint8_t>(two)),
                            e4m3_to_float(static_cast<uint8_t>(two >> 8)));
}

// The fragments' places are those of the PTX manual, section "Matrix Fragments for mma.m16n8k16".
template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T type) {
  const auto* all = emulator::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const int group = emulator::lane() / 4, in_group = emulator::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + (i >= 2 ? 8 : 0);
    const int column = in_group * 2 + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int a_lane = (row % 8) * 4 + (k % 8) / 2;
      const int a_word = (row >= 8 ? 1 : 0) + (k >= 8 ? 2 : 0);
      const int b_lane = column * 4 + (k % 8) / 2;
      sum += double{pair_element(all[a_lane].word[a_word], k % 2, type)} *
             pair_element(all[b_lane].word[k >= 8 ? 5 : 4], k % 2, type);
    }
    c[i] = static_cast<float>(sum);
  }
}

inline uint4 load_streaming(const void* p) {
  uint4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline uint4 load_cached(const void* p) { return load_streaming(p); }
inline uint4 load_vector_before(const void* p) { return load_streaming(p); }
inline uint2 load_pair_before(const void* p) {
  uint2 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline uint32_t load_byte_before(const void* p) { return *static_cast<const uint8_t*>(p); }
inline uint32_t load_half_before(const void* p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline uint8_t* dynamic_shared() { return emulator::shared_memory(emulator::cluster_rank()); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - dynamic_shared());
}
inline void copy_async(uint32_t target, const void* source, int valid) {
  emulator::queue_copy(target, source, 16, valid);
}
inline void copy_async_word(uint32_t target, const void* source, int valid) {
  emulator::queue_copy(target, source, 4, valid);
}
inline void copy_async_ahead(uint32_t target, const void* source, int valid) {
  emulator::queue_copy(target, source, 16, valid);
}
inline void commit_copies() { emulator::commit_copies(); }
template <int kPending>
void wait_copies() {
  emulator::wait_copies(kPending);
}
inline void wait_copies(int pending) { emulator::wait_copies(pending); }
inline uint4 load_shared(uint32_t address) {
  uint4 v;
  std::memcpy(&v, dynamic_shared() + address, sizeof(v));
  return v;
}
inline void store_shared(uint32_t address, uint4 v) {
  std::memcpy(dynamic_shared() + address, &v, sizeof(v));
}
inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_sync() { emulator::sync_cluster(); }
inline void cluster_arrive() {}
inline void cluster_wait() { emulator::sync_cluster(); }
inline void store_cluster(uint32_t address, int rank, float v) {
  std::memcpy(emulator::shared_memory(rank) + address, &v, sizeof(v));
}
inline float load_cluster(uint32_t address, int rank) {
  float v;
  std::memcpy(&v, emulator::shared_memory(rank) + address, sizeof(v));
  return v;
}

}  // namespace nvfp4::cuda
