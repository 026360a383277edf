// csrc/cuda/tensor_copy.cuh in portable C++; sets its guard. Included after hopper.cuh.
#define NVFP4_CUDA_TENSOR_COPY_CUH

#include <cuda_runtime.h>

struct CUtensorMap {
  const uint8_t* data;
  int element_bytes;
  int64_t rows, columns, row_bytes;
  int box_rows;
};

namespace nvfp4::cuda {

constexpr int kBoxBytes = 128;

inline CUtensorMap tensor_map(const void* data, int element_bytes, int64_t rows, int64_t columns,
                              int64_t row_bytes, int box_rows, bool = false) {
  if (reinterpret_cast<uintptr_t>(data) % 16 || row_bytes % 16 || box_rows > 256 || rows < 1 ||
      columns < 1) {
    fail("a tensor map that the driver would refuse");
  }
  return {static_cast<const uint8_t*>(data), element_bytes, rows, columns, row_bytes, box_rows};
}

inline void barrier_arrive_cluster(uint32_t barrier, int rank) {
  emulator::arrive_counted(barrier, rank, 1, 0);
}
inline void copy_box_to(uint32_t blocks, uint32_t target, const CUtensorMap& map, int column,
                        int row, uint32_t barrier) {
  if (target % 1024) fail("a box off its alignment");
  for (int rank = 0; blocks >> rank; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    emulator::copy_counted(barrier, rank, map.box_rows * kBoxBytes, [=] {
      for (int r = 0; r < map.box_rows; ++r) {
        for (int i = 0; i < kBoxBytes; ++i) {
          const int64_t from_row = int64_t{row} + r, element = column + i / map.element_bytes;
          const bool inside =
              from_row >= 0 && from_row < map.rows && element >= 0 && element < map.columns;
          const uint32_t to = target + r * kBoxBytes + ((i / 16 ^ r % 8) * 16 + i % 16);
          emulator::shared_memory(rank)[to] =
              inside ? map.data[from_row * map.row_bytes + column * map.element_bytes + i] : 0;
        }
      }
    });
  }
}

inline void prefetch_map(const CUtensorMap&) {}

template <bool kOnce = false>
inline void copy_box(uint32_t target, const CUtensorMap& map, int column, int row,
                     uint32_t barrier) {
  copy_box_to(1u << emulator::cluster_rank(), target, map, column, row, barrier);
}

}  // namespace nvfp4::cuda
