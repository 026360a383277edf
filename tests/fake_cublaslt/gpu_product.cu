// The double's product on a GPU: a thread an element and ordinary loads, so that a sanitizer can
// follow every byte from our decoding kernels through it to our epilogue.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include "gpu_product.h"

namespace {

__device__ float load(const void* data, int type, int64_t index) {
  if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  if (type == CUDA_R_16F) return __half2float(static_cast<const __half*>(data)[index]);
  return static_cast<const float*>(data)[index];
}

__device__ void store(void* data, int type, int64_t index, float value) {
  if (type == CUDA_R_16BF) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else if (type == CUDA_R_16F) {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  } else {
    static_cast<float*>(data)[index] = value;
  }
}

__global__ void product_kernel(GpuMatrix a, GpuMatrix b, GpuMatrix d, const void* bias,
                               const float* gpu_alpha, float alpha) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, column = blockIdx.y;
  if (row >= d.rows) return;
  float sum = 0;
  for (int64_t k = 0; k < a.rows; ++k) {
    sum += load(a.data, a.type, row * a.leading_dimension + k) *
           load(b.data, b.type, column * b.leading_dimension + k);
  }
  float value = (gpu_alpha ? *gpu_alpha : alpha) * sum;
  if (bias) value += load(bias, d.type, row);
  store(const_cast<void*>(d.data), d.type, column * d.leading_dimension + row, value);
}

}  // namespace

bool gpu_product(const GpuMatrix& a, const GpuMatrix& b, const GpuMatrix& d, const void* bias,
                 const float* alpha, bool alpha_on_gpu, void* stream) {
  constexpr unsigned kThreads = 128;
  const dim3 grid(static_cast<unsigned>((d.rows + kThreads - 1) / kThreads),
                  static_cast<unsigned>(d.columns));
  product_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      a, b, d, bias, alpha_on_gpu ? alpha : nullptr, alpha_on_gpu ? 0.0f : *alpha);
  return cudaGetLastError() == cudaSuccess;
}
