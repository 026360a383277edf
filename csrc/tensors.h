// Torch tensors as the ops see them: checked arguments in, freshly allocated outputs out.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"

namespace nvfp4 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string shape_text(const Tensor& tensor);
const char* dtype_text(ScalarType type);

// The product of every dimension but the last.
int64_t rows_of(const Tensor& tensor);
int64_t last_dim(const Tensor& tensor);

bool has_type(const Tensor& tensor, ScalarType type);

// A tensor's elements in order: its own where they are, else those of a contiguous copy that lives
// as long as this object.
struct Contiguous {
  const void* data = nullptr;
  std::optional<Tensor> copy;
};
Contiguous as_contiguous(const Tensor& tensor);

// A matrix of rows with a contiguous last dimension, likewise.
struct Rows {
  Contiguous elements;
  int64_t rows, cols, stride;
};
Rows as_rows(const Tensor& tensor);

std::optional<DType> float_type(ScalarType type);  // FP32, BF16, FP16
ScalarType scalar_type(DType type);

// `x` must be FP32, BF16 or FP16 (`allow_float32`), at least 1-d, its last dimension a positive
// multiple of `multiple`.
DType check_activation(const Tensor& x, const char* name, int64_t multiple, bool allow_float32);
// `data` must be uint8 or float4_e2m1fn_x2 whose last dimension is K / 2 with K % 16 == 0; gives K.
int64_t check_packed(const Tensor& data, const char* name);
// `scale` must be float8_e4m3fn of the padded 128x4 shape, or (rows, cols) where not swizzled.
void check_scale(const Tensor& scale, const char* name, int64_t rows, int64_t cols, bool swizzled);
void check_same_device(const Tensor& tensor, const char* name, const Tensor& other,
                       const char* other_name);
// None is 1.0. A CPU tensor of one element becomes a host value, wherever the operands live.
Scalar check_scalar(const std::optional<Tensor>& scalar, const char* name, const Tensor& operand);
DType check_out_dtype(const std::optional<ScalarType>& out_dtype, DType fallback);

Tensor allocate(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like);
// Sizes of `like` with its last dimension replaced.
std::vector<int64_t> sizes_with_last(const Tensor& like, int64_t last);
// (round_up(rows, 128), round_up(cols, 4))
std::vector<int64_t> swizzled_sizes(int64_t rows, int64_t cols);

// Memory of the current GPU for the length of a call, none for 0 bytes: torch's caching allocator
// keeps it for the current stream. No tensor, which would take the host three times as long.
class Workspace {
 public:
  explicit Workspace(int64_t bytes);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Makes the tensor's GPU current for the scope and gives its current stream. Nothing on the CPU.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor);
  cuda::Stream stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cuda::Stream stream_ = nullptr;
};

}  // namespace nvfp4
