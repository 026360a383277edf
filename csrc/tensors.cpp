#include "tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

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

int32_t code_of(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

// Where a tensor is, in torch's own numbers.
struct Place {
  int32_t type = 0, index = 0;
};

Place place_of(const Tensor& tensor) {
  Place place;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
}

}  // namespace

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  const auto sizes = tensor.sizes();
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + (sizes.size() == 1 ? ",)" : ")");
}

const char* dtype_text(ScalarType type) { return torch::headeronly::toString(type); }

int64_t rows_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  return rows;
}

int64_t last_dim(const Tensor& tensor) { return tensor.size(-1); }

// scalar_type() compares with one type after the other; this asks for the one.
bool has_type(const Tensor& tensor, ScalarType type) {
  int32_t found = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &found));
  return found == code_of(type);
}

Contiguous as_contiguous(const Tensor& tensor) {
  if (tensor.is_contiguous()) return {tensor.const_data_ptr(), std::nullopt};
  Tensor copy = torch::stable::contiguous(tensor);
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
  const auto type = float_type(x.scalar_type());
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
  const ScalarType type = data.scalar_type();
  NVFP4_CHECK_TYPE(type == ScalarType::Byte || type == ScalarType::Float4_e2m1fn_x2, name,
                   ".dtype must be uint8 or float4_e2m1fn_x2 (two E2M1 codes a byte), got ",
                   dtype_text(type), ": quantize it first");
  NVFP4_CHECK(data.dim() >= 2, name, " must be (rows, K/2), got shape ", shape_text(data));
  const int64_t bytes = last_dim(data);
  NVFP4_CHECK(bytes > 0 && bytes % kBlockBytes == 0, name,
              ".shape[-1] (K/2 bytes) must be a multiple of 8, got ", bytes,
              ": K must be a multiple of 16");
  return bytes * 2;
}

void check_scale(const Tensor& scale, const char* name, int64_t rows, int64_t cols, bool swizzled) {
  NVFP4_CHECK_TYPE(has_type(scale, ScalarType::Float8_e4m3fn), name,
                   ".dtype must be float8_e4m3fn, got ", dtype_text(scale.scalar_type()),
                   ": view it with .view(torch.float8_e4m3fn) if its bytes are UE4M3");
  if (swizzled) {
    const int64_t padded_rows = round_up(rows, kTileRows), padded_cols = round_up(cols, kTileCols);
    const auto sizes = scale.sizes();
    NVFP4_CHECK(sizes.size() == 2 && sizes[0] == padded_rows && sizes[1] == padded_cols, name,
                " must be swizzled (128x4 tiles) with shape (", padded_rows, ", ", padded_cols,
                ") for ", rows, " rows and K = ", cols * kBlockSize, ", got ", shape_text(scale),
                ": torch.ops.nvfp4.swizzle_scales makes it from row-major (", rows, ", ", cols,
                ")");
  } else {
    NVFP4_CHECK(scale.dim() >= 1 && last_dim(scale) == cols && rows_of(scale) == rows, name,
                " must be row-major with shape (", rows, ", ", cols, ") = (rows, K/16), got ",
                shape_text(scale), ": torch.ops.nvfp4.unswizzle_scales makes it from 128x4 tiles");
  }
}

void check_same_device(const Tensor& tensor, const char* name, const Tensor& other,
                       const char* other_name) {
  const Place place = place_of(tensor), expected = place_of(other);
  NVFP4_CHECK(place.type == expected.type && place.index == expected.index, name,
              " must be on the device of ", other_name, ", got ",
              tensor.is_cuda() ? concat("cuda:", tensor.get_device_index()) : "cpu", " and ",
              other.is_cuda() ? concat("cuda:", other.get_device_index()) : "cpu",
              ": move it with .to()");
}

Scalar check_scalar(const std::optional<Tensor>& scalar, const char* name, const Tensor& operand) {
  if (!scalar) return {};
  NVFP4_CHECK_TYPE(has_type(*scalar, ScalarType::Float), name, ".dtype must be float32, got ",
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

Tensor allocate(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  const Place place = place_of(like);
  // The C shim rather than stable::empty: no dispatcher look-up by name on the way.
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               code_of(type), place.type, place.index, &handle));
  return Tensor(handle);
}

std::vector<int64_t> sizes_with_last(const Tensor& like, int64_t last) {
  const auto sizes = like.sizes();
  std::vector<int64_t> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

std::vector<int64_t> swizzled_sizes(int64_t rows, int64_t cols) {
  return {round_up(rows, kTileRows), round_up(cols, kTileCols)};
}

Workspace::Workspace(int64_t bytes) {
  if (bytes == 0) return;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data_));
}

Workspace::~Workspace() {
  if (data_) aoti_torch_cuda_caching_allocator_raw_delete(data_);
}

CudaScope::CudaScope(const Tensor& tensor) {
  if (!tensor.is_cuda()) return;
#if !defined(NVFP4_WITH_CUDA)
  NVFP4_CHECK(false,
              "this build of nvfp4_linear has no CUDA kernels, and an operand is on a GPU: rebuild "
              "where nvcc (CUDA 13) is installed");
#endif
  const int32_t index = tensor.get_device_index();
#if defined(NVFP4_WITH_CUDA)
  // A guard is only worth its cost where the device is not current already.
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != index) guard_.emplace(index);
#endif
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index, &stream_));
}

}  // namespace nvfp4
