// dequantize and the two scale layouts on the CPU.
#include <cstring>

#include "floats.h"
#include "parallel.h"

namespace nvfp4::cpu {

void dequantize(const DequantizeParams& p) {
  const int64_t cols = p.k / kBlockSize;
  const int64_t tiles_per_row = round_up(cols, kTileCols) / kTileCols;
  dispatch_float(p.out_type, [&](auto type) {
    using T = decltype(type);
    auto* out = static_cast<typename T::Storage*>(p.out);
    parallel_for(p.rows, kGrainElements / p.k, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = p.row_begin + i;
        for (int64_t c = 0; c < cols; ++c) {
          const int64_t offset =
              p.swizzled ? swizzled_offset(row, c, tiles_per_row) : row * cols + c;
          const float scale = e4m3_to_float(p.block_scale[offset]);
          const uint8_t* in = p.data + row * (p.k / 2) + c * kBlockBytes;
          auto* to = out + i * p.k + c * kBlockSize;
          for (int j = 0; j < kBlockBytes; ++j) {
            to[2 * j] = T::store(e2m1_to_float(in[j] & 0xF) * scale * p.global_scale.value);
            to[2 * j + 1] = T::store(e2m1_to_float(in[j] >> 4) * scale * p.global_scale.value);
          }
        }
      }
    });
  });
}

void swizzle_scales(const SwizzleParams& p) {
  const int64_t tiles_per_row = round_up(p.cols, kTileCols) / kTileCols;
  const int64_t padded_rows = round_up(p.rows, kTileRows);
  std::memset(p.out, 0, static_cast<size_t>(padded_rows * tiles_per_row * kTileCols));
  parallel_for(p.rows, kGrainElements / p.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < p.cols; ++c) {
        p.out[swizzled_offset(r, c, tiles_per_row)] = p.in[r * p.cols + c];
      }
    }
  });
}

void unswizzle_scales(const SwizzleParams& p) {
  const int64_t tiles_per_row = round_up(p.cols, kTileCols) / kTileCols;
  parallel_for(p.rows, kGrainElements / p.cols, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < p.cols; ++c) {
        p.out[r * p.cols + c] = p.in[swizzled_offset(r, c, tiles_per_row)];
      }
    }
  });
}

}  // namespace nvfp4::cpu
