// Makes tensor maps. The driver's function for it is asked for at run time: nothing links to
// libcuda, and a machine without a GPU can load this library.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace nvfp4::cuda {
namespace {

constexpr int kBoxBytes = 128;

decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (found == nullptr) throw std::runtime_error("this CUDA driver has no cuTensorMapEncodeTiled");
  return found;
}

}  // namespace

CUtensorMap tensor_map(const void* data, int element_bytes, int64_t rows, int64_t columns,
                       int64_t row_bytes, int box_rows, bool once) {
  CUtensorMap map{};
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxBytes / element_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[2] = {1, 1};
  const CUresult status = encoder()(
      &map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 2,
      const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B,
      once ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refused " + std::to_string(rows) + " x " +
                             std::to_string(columns) + " elements of " +
                             std::to_string(element_bytes) + " bytes, rows " +
                             std::to_string(row_bytes) + " bytes apart: CUresult " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace nvfp4::cuda
