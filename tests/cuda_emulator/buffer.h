// Memory for tests of kernels on the emulator, and its values by their types.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "kernels.h"
#include "nvfp4.h"

namespace nvfp4 {

// `size` bytes of 0x7F, NaN in every type, that end (up to alignment) at an unreadable page.
class Buffer {
 public:
  explicit Buffer(int64_t size, int64_t misalign = 0) : size_(size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t used = round_up(size + misalign, 16);
    mapped_ = round_up(std::max<int64_t>(used, 1), page) + page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - used + misalign;
    std::memset(data_, 0x7F, size);
  }
  ~Buffer() { munmap(base_, mapped_); }
  Buffer(const Buffer&) = delete;
  uint8_t* data() { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }

 private:
  int64_t size_, mapped_;
  uint8_t *base_, *data_;
};

inline int64_t size_of(DType t) { return t == DType::kFloat32 ? 4 : 2; }

inline uint32_t nan_of(DType t) {
  return t == DType::kFloat32 ? kNanFloat32 : t == DType::kBFloat16 ? kNanBFloat16 : kNanFloat16;
}

inline float load(const void* p, DType t, int64_t i) {
  if (t == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (t == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}

inline void store(void* p, DType t, int64_t i, float v) {
  const bool nan = v != v;
  if (t == DType::kFloat32) {
    static_cast<float*>(p)[i] = nan ? float_from_bits(kNanFloat32) : v;
  } else if (t == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(p)[i] =
        nan ? __ushort_as_bfloat16(kNanBFloat16) : __float2bfloat16_rn(v);
  } else {
    static_cast<__half*>(p)[i] = nan ? __ushort_as_half(kNanFloat16) : __float2half_rn(v);
  }
}

}  // namespace nvfp4
