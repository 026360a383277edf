// What the tests of fused GEMMs on the emulator share: operands in memory that ends at a page which
// can't be read, and their values.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "nvfp4.h"

namespace nvfp4 {

inline std::mt19937 rng(5);
inline float uniform() { return static_cast<float>(rng()) * 0x1p-31f - 1.0f; }

// `size` bytes of 0x7F, NaN in every type, that end at an unreadable page.
class Buffer {
 public:
  explicit Buffer(int64_t size) {
    const int64_t page = sysconf(_SC_PAGESIZE), used = round_up(size, 16);
    mapped_ = round_up(std::max<int64_t>(used, 1), page) + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - used;
    std::memset(data_, 0x7F, used);
  }
  ~Buffer() { munmap(base_, mapped_); }
  Buffer(const Buffer&) = delete;
  uint8_t* data() { return data_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  int64_t mapped_;
  uint8_t *base_, *data_;
};

inline int64_t size_of(DType t) { return t == DType::kFloat32 ? 4 : 2; }

inline float load(const void* p, DType t, int64_t i) {
  if (t == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (t == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}

// Packed rows, scale bytes below `most_scale`; the scales' padding stays NaN: it must not matter.
struct Packed {
  int64_t k, tiles;
  Buffer data, scale;

  Packed(int64_t rows, int64_t columns, uint32_t most_scale)
      : k(columns),
        tiles((k / kBlockSize + kTileCols - 1) / kTileCols),
        data(rows * k / 2),
        scale(round_up(rows, kTileRows) * tiles * kTileCols) {
    for (int64_t i = 0; i < rows * k / 2; ++i) data.data()[i] = static_cast<uint8_t>(rng());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < k / kBlockSize; ++c) {
        scale.data()[swizzled_offset(r, c, tiles)] = static_cast<uint8_t>(rng() % most_scale);
      }
    }
  }
  double at(int64_t r, int64_t c) {
    return double{e2m1_to_float(data.data()[(r * k + c) / 2] >> (c % 2 ? 4 : 0) & 0xF)} *
           e4m3_to_float(scale.data()[swizzled_offset(r, c / kBlockSize, tiles)]);
  }
};

enum Kind { kPacked, kBf16, kFp16, kKinds };

}  // namespace nvfp4
