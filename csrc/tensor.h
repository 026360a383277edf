// A torch tensor as the ops hold it, and the boxing of the ops around it.
//
// torch::stable::Tensor costs an allocation for every argument, and every question asked of it is a
// call across the ABI: of some fifty in a gemm, half are the same ones again. This owns the handle
// alone and asks once.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "check.h"

namespace nvfp4 {

using torch::headeronly::ScalarType;

// Torch's number of a type, which need not be ours.
inline int32_t code_of(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}  // takes it over
  Tensor(Tensor&& other) noexcept : handle_(other.release()), facts_(other.facts_) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(facts_, other.facts_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

  int64_t dim() const { return facts().dim; }
  const int64_t* sizes() const { return facts().sizes; }
  // `d` from the end where negative. In range: nobody checks.
  int64_t size(int64_t d) const { return sizes()[d < 0 ? d + dim() : d]; }
  int64_t stride(int64_t d) const {
    int64_t* strides = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &strides));
    return strides[d];
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t d = 0; d < dim(); ++d) count *= size(d);
    return count;
  }
  bool is_contiguous() const {
    bool contiguous = false;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &contiguous));
    return contiguous;
  }

  int32_t type_code() const { return facts().type; }
  bool has_type(ScalarType type) const { return type_code() == code_of(type); }
  ScalarType scalar_type() const {  // compares with one type after the other
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type_code()));
  }

  int32_t device_type() const { return facts().device_type; }
  int32_t device_index() const { return facts().device_index; }
  bool is_cuda() const { return device_type() == aoti_torch_device_type_cuda(); }
  bool is_cpu() const { return device_type() == aoti_torch_device_type_cpu(); }

  const void* const_data_ptr() const {
    const void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &data));
    return data;
  }
  void* mutable_data_ptr() const {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_, &data));
    return data;
  }

 private:
  struct Facts {
    const int64_t* sizes = nullptr;
    int64_t dim = -1;  // not asked yet
    int32_t type = 0, device_type = 0, device_index = 0;
  };

  const Facts& facts() const {
    if (facts_.dim < 0) ask();
    return facts_;
  }
  void ask() const {
    int64_t* sizes = nullptr;
    Facts facts;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle_, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &facts.type));
    // What torch makes of None has sizes and a type, and is nowhere.
    const auto answer = aoti_torch_get_device_type(handle_, &facts.device_type);
    NVFP4_CHECK_TYPE(answer == TORCH_SUCCESS, "an argument that must be a tensor is None");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &facts.device_index));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &facts.dim));
    facts.sizes = sizes;
    facts_ = facts;
  }

  AtenTensorHandle handle_;
  mutable Facts facts_;
};

// ---------------------------------------------------------------------------------------- boxing

// An argument from torch's stack, which gives up what it owned.
template <typename T>
struct Unboxed {
  static T call(StableIValue value) { return torch::stable::detail::to<T>(value); }
};
template <>
struct Unboxed<Tensor> {
  static Tensor call(StableIValue value) {
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
  }
};
template <>
struct Unboxed<std::optional<Tensor>> {
  static std::optional<Tensor> call(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle ? std::optional<Tensor>(std::in_place, *handle) : std::nullopt;
  }
};
// torch's own conversion leaves a copy of the text behind at every call.
template <>
struct Unboxed<std::string> {
  static std::string call(StableIValue value) {
    const auto handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string text(data, length);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

// A result for torch's stack, which takes over what it owned.
inline StableIValue box(Tensor&& tensor) { return torch::stable::detail::from(tensor.release()); }
template <typename T>
StableIValue box(T&& value) {
  return torch::stable::detail::from(std::forward<T>(value));
}

template <typename... Results, size_t... kIndex>
void put(StableIValue* stack, std::tuple<Results...>&& results, std::index_sequence<kIndex...>) {
  ((stack[kIndex] = box(std::move(std::get<kIndex>(results)))), ...);
}
template <typename... Results>
void put(StableIValue* stack, std::tuple<Results...>&& results) {
  put(stack, std::move(results), std::index_sequence_for<Results...>{});
}
template <typename Result>
void put(StableIValue* stack, Result&& result) {
  stack[0] = box(std::forward<Result>(result));
}

template <typename Result, typename... Arguments, size_t... kIndex>
void call_boxed(Result (*op)(Arguments...), StableIValue* stack, std::index_sequence<kIndex...>) {
  // In braces: from the first to the last.
  std::tuple<std::decay_t<Arguments>...> arguments{
      Unboxed<std::decay_t<Arguments>>::call(stack[kIndex])...};
  put(stack, op(std::get<kIndex>(arguments)...));
}

template <typename Result, typename... Arguments>
constexpr size_t argument_count(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// TORCH_BOX for ops of our tensors. torch knows of the schema how many there are on the stack.
template <auto op>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  call_boxed(op, stack, std::make_index_sequence<argument_count(op)>{});
}

}  // namespace nvfp4
