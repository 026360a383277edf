// quantize, swiglu_quantize and global_scale on the CPU: the recipe of nvfp4.h, a block at a time.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "floats.h"
#include "parallel.h"

namespace nvfp4::cpu {
namespace {

struct BlockResult {
  uint64_t codes;  // 16 nibbles, element 0 in the lowest
  uint8_t scale;
};

NVFP4_HD BlockResult quantize_block(const float (&x)[kBlockSize], float g) {
  float amax = 0.0f;
  int non_finite = 0;
  for (float v : x) {
    const bool finite = is_finite(v);
    const float magnitude = finite ? abs_bits(v) : 0.0f;
    amax = magnitude > amax ? magnitude : amax;
    non_finite += !finite;
  }
  const BlockScale scale = make_block_scale(amax, non_finite == 0, g);
  uint64_t codes = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    codes |= static_cast<uint64_t>(quantize_element(x[i], scale.divisor)) << (4 * i);
  }
  return {codes, scale.code};
}

// One row of scales: where column c goes.
struct ScaleRow {
  uint8_t* base;
  int64_t row, tiles_per_row;
  bool swizzled;
  uint8_t& operator[](int64_t c) const {
    return base[swizzled ? swizzled_offset(row, c, tiles_per_row) : c];
  }
};

// load(row, k0, x): the 16 values of row `row` that start at column k0, in FP32.
template <typename Load>
void quantize_rows(const QuantizeParams& p, const Load& load) {
  const int64_t cols = p.k / kBlockSize;
  const int64_t tiles_per_row = round_up(cols, kTileCols) / kTileCols;
  const int64_t scale_rows = p.swizzled ? round_up(p.padded_rows, kTileRows) : p.padded_rows;
  const float g = p.global_scale.value;
  parallel_for(scale_rows, kGrainElements / p.k, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* linear = p.block_scale + row * cols;
      const ScaleRow scale{p.swizzled ? p.block_scale : linear, row, tiles_per_row, p.swizzled};
      if (row >= p.rows) {
        if (row < p.padded_rows) std::memset(p.data + row * (p.k / 2), 0, p.k / 2);
        for (int64_t c = 0; c < (p.swizzled ? tiles_per_row * kTileCols : cols); ++c) scale[c] = 0;
        continue;
      }
      for (int64_t c = 0; c < cols; ++c) {
        float x[kBlockSize];
        load(row, c * kBlockSize, x);
        const BlockResult block = quantize_block(x, g);
        scale[c] = block.scale;
        uint8_t* out = p.data + row * (p.k / 2) + c * kBlockBytes;
        for (int i = 0; i < kBlockBytes; ++i) out[i] = static_cast<uint8_t>(block.codes >> (8 * i));
      }
      if (p.swizzled) {
        for (int64_t c = cols; c < tiles_per_row * kTileCols; ++c) scale[c] = 0;
      }
    }
  });
}

}  // namespace

void quantize(const QuantizeParams& p) {
  dispatch_float(p.x_type, [&](auto type) {
    using T = decltype(type);
    const auto* x = static_cast<const typename T::Storage*>(p.x);
    quantize_rows(p, [&](int64_t row, int64_t k0, float (&out)[kBlockSize]) {
      const auto* in = x + row * p.x_row_stride + k0;
      for (int i = 0; i < kBlockSize; ++i) out[i] = T::load(in[i]);
    });
  });
}

void swiglu_quantize(const QuantizeParams& p) {
  dispatch_float(p.x_type, [&](auto type) {
    using T = decltype(type);
    const auto* x = static_cast<const typename T::Storage*>(p.x);
    quantize_rows(p, [&](int64_t row, int64_t k0, float (&out)[kBlockSize]) {
      const auto* gate = x + row * p.x_row_stride + k0;
      const auto* up = gate + p.k;
      for (int i = 0; i < kBlockSize; ++i) out[i] = swiglu(T::load(gate[i]), T::load(up[i]));
    });
  });
}

void global_scale(const AmaxParams& p) {
  dispatch_float(p.x_type, [&](auto type) {
    using T = decltype(type);
    const auto* x = static_cast<const typename T::Storage*>(p.x);
    // The maximum of finite magnitudes as integers: their order is the floats' order, and an
    // integer maximum does not depend on who comes first.
    std::atomic<uint32_t> amax{0};
    parallel_for(p.rows, kGrainElements / std::max<int64_t>(p.cols, 1),
                 [&](int64_t begin, int64_t end) {
                   uint32_t local = 0;
                   for (int64_t row = begin; row < end; ++row) {
                     const auto* in = x + row * p.x_row_stride;
                     for (int64_t c = 0; c < p.cols; ++c) {
                       float v = T::load(in[c]);
                       if (p.swiglu) v = swiglu(v, T::load(in[p.cols + c]));
                       const uint32_t magnitude = bits_from_float(v) & 0x7FFFFFFFu;
                       local = std::max(local, magnitude < 0x7F800000u ? magnitude : 0u);
                     }
                   }
                   uint32_t seen = amax.load();
                   while (seen < local && !amax.compare_exchange_weak(seen, local)) {
                   }
                 });
    *p.out = global_scale_from_amax(float_from_bits(amax.load()));
  });
}

}  // namespace nvfp4::cpu
