// The register tiles of gemm.cpp, included once per instruction set, with NVFP4_TILE_LANES floats a
// register and NVFP4_TILE_ROWS rows. Every product and sum here is exact (or, for ordered_tile, has
// exact products added in one fixed order), so FMA contraction is allowed and changes nothing.

constexpr int kRows = NVFP4_TILE_ROWS;
constexpr int kLanes = NVFP4_TILE_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef double Doubles __attribute__((vector_size(kLanes * 4)));

template <typename Vector, typename T>
inline Vector load(const T* from) {  // no alignment to rely on
  Vector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <typename Vector, typename T>
inline void store(T* to, const Vector& v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

// sums (kRows, kPanelCols) = A (kRows, depth) . B (depth, kPanelCols); depth % 16 == 0.
// Each block of 16 is exact in FP32, and at most kChunkK / 16 of them are exact in FP64.
void exact_tile(const float* a, int64_t a_stride, const float* b, int64_t depth, double* sums) {
  constexpr int kStep = 2 * kLanes;  // columns at a time: two registers a row
  for (int i = 0; i < kRows * kPanelCols; ++i) sums[i] = 0.0;
  for (int64_t k0 = 0; k0 < depth; k0 += kBlockSize) {
    for (int c0 = 0; c0 < kPanelCols; c0 += kStep) {
      Floats dot[kRows][2] = {};
      const float* block_b = b + k0 * kPanelCols + c0;
#pragma GCC unroll 16
      for (int k = 0; k < kBlockSize; ++k) {
        const Floats b0 = load<Floats>(block_b + k * kPanelCols);
        const Floats b1 = load<Floats>(block_b + k * kPanelCols + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const float value = a[r * a_stride + k0 + k];
          dot[r][0] += b0 * value;
          dot[r][1] += b1 * value;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        float block[kStep];
        store(block, dot[r][0]);
        store(block + kLanes, dot[r][1]);
        double* out = sums + r * kPanelCols + c0;
        for (int c = 0; c < kStep; ++c) out[c] += static_cast<double>(block[c]);
      }
    }
  }
}

// sums (kRows, kPanelCols) += the same product of FP64 values, each element added in the order of
// k.
void ordered_tile(const double* a, int64_t a_stride, const double* b, int64_t depth, double* sums) {
  for (int c0 = 0; c0 < kPanelCols; c0 += kLanes) {
    Doubles total[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      total[r][0] = load<Doubles>(sums + r * kPanelCols + c0);
      total[r][1] = load<Doubles>(sums + r * kPanelCols + c0 + kLanes / 2);
    }
    for (int64_t k = 0; k < depth; ++k) {
      const Doubles b0 = load<Doubles>(b + k * kPanelCols + c0);
      const Doubles b1 = load<Doubles>(b + k * kPanelCols + c0 + kLanes / 2);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const double value = a[r * a_stride + k];
        total[r][0] += b0 * value;
        total[r][1] += b1 * value;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(sums + r * kPanelCols + c0, total[r][0]);
      store(sums + r * kPanelCols + c0 + kLanes / 2, total[r][1]);
    }
  }
}

const TileKernels kTileKernels{kRows, exact_tile, ordered_tile};
