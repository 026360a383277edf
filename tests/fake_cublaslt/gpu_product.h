// The double's product where operands are in GPU memory: see gpu_product.cu.
#pragma once

#include <cstdint>

// A column-major matrix of BF16, FP16 or FP32 (cudaDataType).
struct GpuMatrix {
  const void* data;
  int type;
  int64_t rows, columns, leading_dimension;
};

// d = alpha * a^T . b + bias along d's rows; `bias` is null or has one type with d. `alpha` is one
// float, in GPU memory or the host's. Whether the launch was taken.
bool gpu_product(const GpuMatrix& a, const GpuMatrix& b, const GpuMatrix& d, const void* bias,
                 const float* alpha, bool alpha_on_gpu, void* stream);
