// Torch tensors as the ops see them: checked arguments in, freshly allocated outputs out.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>

#include "kernels.h"
#include "tensor.h"

namespace nvfp4 {

std::string shape_text(const Tensor& tensor);
const char* dtype_text(ScalarType type);

// The product of every dimension but the last.
int64_t rows_of(const Tensor& tensor);
int64_t last_dim(const Tensor& tensor);

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

// FP32, BF16, FP16
std::optional<DType> float_type(ScalarType type);
std::optional<DType> float_type(const Tensor& tensor);
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

// Sizes of an output: without an allocation up to the dimensions that tensors have.
class Sizes {
 public:
  Sizes(std::initializer_list<int64_t> sizes);
  Sizes(const int64_t* sizes, size_t count);
  size_t count() const { return count_; }
  int64_t* data() { return many_ ? many_.get() : few_.data(); }
  const int64_t* data() const { return many_ ? many_.get() : few_.data(); }
  int64_t& last() { return data()[count_ - 1]; }

 private:
  size_t count_;
  std::array<int64_t, 8> few_;
  std::unique_ptr<int64_t[]> many_;
};

Tensor allocate(const Sizes& sizes, ScalarType type, const Tensor& like);
// Sizes of `like` with its last dimension replaced.
Sizes sizes_with_last(const Tensor& like, int64_t last);
// (round_up(rows, 128), round_up(cols, 4))
Sizes swizzled_sizes(int64_t rows, int64_t cols);

// Memory of the current GPU for the length of a call: torch's caching allocator keeps it for the
// current stream. One block in parts, each on a 256-byte boundary, null where it has no bytes. No
// tensor, which would take the host three times as long.
class Workspace {
 public:
  explicit Workspace(std::initializer_list<int64_t> bytes_of_parts);
  explicit Workspace(int64_t bytes) : Workspace({bytes}) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* part(size_t index) const { return parts_[index]; }
  void* data() const { return part(0); }

 private:
  static constexpr size_t kMaxParts = 4;
  void* block_ = nullptr;
  std::array<void*, kMaxParts> parts_{};
};

// Makes the tensor's GPU current for the scope and gives its current stream. Nothing on the CPU.
class CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor);
  cuda::Stream stream() const { return stream_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
#if defined(NVFP4_WITH_CUDA)
  std::optional<cuda::KnownDevice> known_;
#endif
  cuda::Stream stream_ = nullptr;
};

}  // namespace nvfp4
