// csrc/cuda/tensor_copy.cuh in portable C++, as far as gemm_mid_m uses it; sets its guard. Included
// after hopper.cuh.
#define NVFP4_CUDA_TENSOR_COPY_CUH

#include <cstdio>
#include <cstdlib>

struct CUtensorMap {
  const uint8_t* data;
  int element_bytes;
  int64_t rows, columns, row_bytes;
  int box_rows;
};

namespace nvfp4::cuda {

inline CUtensorMap tensor_map(const void* data, int element_bytes, int64_t rows, int64_t columns,
                              int64_t row_bytes, int box_rows) {
  if (reinterpret_cast<uintptr_t>(data) % 16 || row_bytes % 16 || box_rows > 256) {
    std::fprintf(stderr, "a tensor map that the driver would refuse\n");
    std::abort();
  }
  return {static_cast<const uint8_t*>(data), element_bytes, rows, columns, row_bytes, box_rows};
}

// At once, in rows of 128 bytes whose vectors are exclusive-ored with row % 8; zeros outside.
inline void copy_box(uint32_t target, const CUtensorMap& map, int column, int row,
                     uint32_t barrier) {
  if (target % 1024) {
    std::fprintf(stderr, "a box off its alignment\n");
    std::abort();
  }
  for (int r = 0; r < map.box_rows; ++r) {
    for (int i = 0; i < 128; ++i) {
      const int64_t from_row = int64_t{row} + r, element = column + i / map.element_bytes;
      const bool inside = from_row < map.rows && element < map.columns;
      dynamic_shared()[target + r * 128 + ((i / 16 ^ r % 8) * 16 + i % 16)] =
          inside ? map.data[from_row * map.row_bytes + column * map.element_bytes + i] : 0;
    }
  }
  emulator::bytes_arrived(cluster_rank(), barrier, map.box_rows * 128);
}

}  // namespace nvfp4::cuda
