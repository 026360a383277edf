#include "tensors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "check.h"
#include "nvfp4.h"
#if defined(NVFP4_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

// Weak: absent in a CPU build of torch, which never reaches a CUDA tensor. One binary for both.
extern "C" {
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream)
    __attribute__((weak));
AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t bytes, void** pointer)
    __attribute__((weak));
AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void* pointer) __attribute__((weak));
}

namespace nvfp4 {
namespace {

bool same_device(const Tensor& a, const Tensor& b) {
  return a.device_type() == b.device_type() && a.device_index() == b.device_index();
}

std::string device_text(const Tensor& tensor) {
  return tensor.is_cuda() ? concat("cuda:", tensor.device_index()) : "cpu";
}

Tensor contiguous_copy(const Tensor& tensor) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  const torch::stable::Tensor copy = torch::stable::contiguous(torch::stable::Tensor(handle));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(copy.get(), &handle));
  return Tensor(handle);
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + (tensor.dim() == 1 ? ",)" : ")");
}

const char* dtype_text(ScalarType type) { return torch::headeronly::toString(type); }

int64_t rows_of(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) rows *= tensor.size(i);
  return rows;
}

int64_t last_dim(const Tensor& tensor) { return tensor.size(-1); }

Contiguous as_contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return {tensor.const_data_ptr(), std::nullopt};
  Tensor copy = contiguous_copy(tensor);
  const void* data = copy.const_data_ptr();
  return {data, std::move(copy)};
}

Rows as_rows(const Tensor& tensor) {
  const int64_t rows = rows_of(tensor), cols = last_dim(tensor);
  if (tensor.dim() == 2 && tensor.stride(1) == 1 && tensor.stride(0) >= cols) {
    return {{tensor.const_data_ptr(), std::nullopt}, rows, cols, tensor.stride(0)};
  }
  return {as_contiguous(tensor), rows, cols, cols};
}

std::optional<DType> float_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

std::optional<DType> float_type(const Tensor& tensor) {
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (tensor.has_type(scalar_type(type))) return type;
  }
  return std::nullopt;
}

ScalarType scalar_type(DType type) {
  switch (type) {
    case DType::kFloat32:
      return ScalarType::Float;
    case DType::kBFloat16:
      return ScalarType::BFloat16;
    case DType::kFloat16:
      return ScalarType::Half;
  }
  return ScalarType::Undefined;
}

DType check_activation(const Tensor& x, const char* name, int64_t multiple, bool allow_float32) {
  const auto type = float_type(x);
  NVFP4_CHECK_TYPE(type && (allow_float32 || *type != DType::kFloat32), name, ".dtype must be ",
                   allow_float32 ? "float32, bfloat16 or float16" : "bfloat16 or float16", ", got ",
                   dtype_text(x.scalar_type()), ": convert it with .to(torch.bfloat16)");
  NVFP4_CHECK(x.dim() >= 1, name, " must have at least one dimension, got a scalar");
  const int64_t k = last_dim(x);
  NVFP4_CHECK(k > 0 && k % multiple == 0, name, ".shape[-1] must be a multiple of ", multiple,
              ", got ", k, ": pad K");
  return *type;
}

int64_t check_packed(const Tensor& data, const char* name) {
  NVFP4_CHECK_TYPE(data.has_type(ScalarType::Byte) || data.has_type(ScalarType::Float4_e2m1fn_x2),
                   name, ".dtype must be uint8 or float4_e2m1fn_x2 (two E2M1 codes a byte), got ",
                   dtype_text(data.scalar_type()), ": quantize it first");
  NVFP4_CHECK(data.dim() >= 2, name, " must be (rows, K/2), got shape ", shape_text(data));
  const int64_t bytes = last_dim(data);
  NVFP4_CHECK(bytes > 0 && bytes % kBlockBytes == 0, name,
              ".shape[-1] (K/2 bytes) must be a multiple of 8, got ", bytes,
              ": K must be a multiple of 16");
  return bytes * 2;
}

void check_scale(const Tensor& scale, const char* name, int64_t rows, int64_t cols, bool swizzled) {
  NVFP4_CHECK_TYPE(scale.has_type(ScalarType::Float8_e4m3fn), name,
                   ".dtype must be float8_e4m3fn, got ", dtype_text(scale.scalar_type()),
                   ": view it with .view(torch.float8_e4m3fn) if its bytes are UE4M3");
  if (swizzled) {
    const int64_t padded_rows = round_up(rows, kTileRows), padded_cols = round_up(cols, kTileCols);
    const bool shape =
        scale.dim() == 2 && scale.size(0) == padded_rows && scale.size(1) == padded_cols;
    NVFP4_CHECK(shape, name, " must be swizzled (128x4 tiles) with shape (", padded_rows, ", ",
                padded_cols, ") for ", rows, " rows and K = ", cols * kBlockSize, ", got ",
                shape_text(scale), ": torch.ops.nvfp4.swizzle_scales makes it from row-major (",
                rows, ", ", cols, ")");
  } else {
    NVFP4_CHECK(scale.dim() >= 1 && last_dim(scale) == cols && rows_of(scale) == rows, name,
                " must be row-major with shape (", rows, ", ", cols, ") = (rows, K/16), got ",
                shape_text(scale), ": torch.ops.nvfp4.unswizzle_scales makes it from 128x4 tiles");
  }
}

void check_same_device(const Tensor& tensor, const char* name, const Tensor& other,
                       const char* other_name) {
  NVFP4_CHECK(same_device(tensor, other), name, " must be on the device of ", other_name, ", got ",
              device_text(tensor), " and ", device_text(other), ": move it with .to()");
}

Scalar check_scalar(const std::optional<Tensor>& scalar, const char* name, const Tensor& operand) {
  if (!scalar) return {};
  NVFP4_CHECK_TYPE(scalar->has_type(ScalarType::Float), name, ".dtype must be float32, got ",
                   dtype_text(scalar->scalar_type()),
                   ": convert it with .to(torch.float32); its bytes are never reinterpreted");
  NVFP4_CHECK(scalar->numel() == 1, name, " must have one element, got shape ",
              shape_text(*scalar));
  const auto* pointer = static_cast<const float*>(scalar->const_data_ptr());
  if (scalar->is_cpu()) return {nullptr, *pointer};
  check_same_device(*scalar, name, operand, "the operands");
  return {pointer, 1.0f};
}

DType check_out_dtype(const std::optional<ScalarType>& out_dtype, DType fallback) {
  if (!out_dtype) return fallback;
  const auto type = float_type(*out_dtype);
  NVFP4_CHECK_TYPE(type, "out_dtype must be bfloat16, float16 or float32, got ",
                   dtype_text(*out_dtype));
  return *type;
}

Sizes::Sizes(const int64_t* sizes, size_t count) : count_(count) {
  if (count > few_.size()) many_ = std::make_unique<int64_t[]>(count);
  std::copy(sizes, sizes + count, data());
}

Sizes::Sizes(std::initializer_list<int64_t> sizes) : Sizes(sizes.begin(), sizes.size()) {}

Tensor allocate(const Sizes& sizes, ScalarType type, const Tensor& like) {
  Sizes strides(sizes.data(), sizes.count());
  int64_t stride = 1;
  for (size_t i = sizes.count(); i-- > 0;) {
    strides.data()[i] = stride;
    stride *= std::max<int64_t>(sizes.data()[i], 1);
  }
  // The C shim rather than stable::empty: no dispatcher look-up by name on the way.
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.count()), sizes.data(), strides.data(),
                               code_of(type), like.device_type(), like.device_index(), &handle));
  return Tensor(handle);
}

Sizes sizes_with_last(const Tensor& like, int64_t last) {
  Sizes result(like.sizes(), static_cast<size_t>(like.dim()));
  result.last() = last;
  return result;
}

Sizes swizzled_sizes(int64_t rows, int64_t cols) {
  return {round_up(rows, kTileRows), round_up(cols, kTileCols)};
}

Workspace::Workspace(std::initializer_list<int64_t> bytes_of_parts) {
  constexpr int64_t kBoundary = 256;
  int64_t all = 0;
  for (const int64_t bytes : bytes_of_parts) all += round_up(bytes, kBoundary);
  if (all == 0) return;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(all), &block_));
  auto* next = static_cast<char*>(block_);
  size_t index = 0;
  for (const int64_t bytes : bytes_of_parts) {
    if (bytes > 0) parts_.at(index) = next;
    next += round_up(bytes, kBoundary);
    ++index;
  }
}

Workspace::~Workspace() {
  if (block_) aoti_torch_cuda_caching_allocator_raw_delete(block_);
}

CudaScope::CudaScope(const Tensor& tensor) {
  if (!tensor.is_cuda()) return;
#if !defined(NVFP4_WITH_CUDA)
  NVFP4_CHECK(false,
              "this build of nvfp4_linear has no CUDA kernels, and an operand is on a GPU: rebuild "
              "where nvcc (CUDA 13) is installed");
#endif
  const int32_t index = tensor.device_index();
#if defined(NVFP4_WITH_CUDA)
  // A guard is only worth its cost where the device is not current already.
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != index) guard_.emplace(index);
  known_.emplace(index);
#endif
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream_));
}

}  // namespace nvfp4
