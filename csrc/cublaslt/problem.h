// What is to be multiplied, independent of how: D (m, n) = out(alpha · A (m, k) · B (n, k)^T +
// bias).
//
// Everything here is row-major and counted in elements. cuBLASLt's column-major view of the same
// bytes is made in one place only, `column_major` in operation.cpp.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

namespace nvfp4::cublaslt {

struct DeviceInfo {
  int index;
  int cc_major;
  int cc_minor;
  int sm_count;
};

enum class ElementType { kNvfp4, kBf16, kFp16, kFp8E4m3 };
enum class OutType { kBf16, kFp16, kFp32 };  // of D, and of the bias
enum class PointerMode { kHost, kDevice };   // where alpha, and the zero that is beta, live

struct Problem {
  ElementType type;
  int64_t m, n, k;
  int64_t lda, ldb, ldd;
  OutType out;
  std::optional<OutType> bias;
  PointerMode alpha;
  // The largest power of two, up to 256, that divides the address of every one of: a, b, their
  // scales, bias, d. `alignment_of` computes it.
  uint32_t alignment;
  size_t workspace_limit;  // bytes the caller is ready to supply
  DeviceInfo device;
  bool skip_pins = false;  // go straight to the heuristic, whatever is pinned
};

// One rung of the ladder that said no, and why, in cuBLASLt's own words where they are its own.
struct Refusal {
  std::string rung;  // "cublaslt-pinned" or "cublaslt-heuristic"
  std::string reason;
};

// Arrays: one address in every file, which is what rungs are compared by.
inline constexpr char kPinnedRung[] = "cublaslt-pinned";
inline constexpr char kHeuristicRung[] = "cublaslt-heuristic";
inline constexpr uint32_t kMaxAlignment = 256;
inline constexpr uint32_t kWorkspaceAlignment = 256;

// Null pointers constrain nothing.
template <typename... Pointers>
uint32_t alignment_of(const Pointers*... pointers) {
  const uintptr_t bits = (kMaxAlignment | ... | reinterpret_cast<uintptr_t>(pointers));
  return static_cast<uint32_t>(bits & -bits);
}

inline const char* name(ElementType type) {
  switch (type) {
    case ElementType::kNvfp4:
      return "nvfp4";
    case ElementType::kBf16:
      return "bf16";
    case ElementType::kFp16:
      return "fp16";
    case ElementType::kFp8E4m3:
      return "fp8_e4m3";
  }
  return "?";
}

inline const char* name(OutType type) {
  switch (type) {
    case OutType::kBf16:
      return "bf16";
    case OutType::kFp16:
      return "fp16";
    case OutType::kFp32:
      return "fp32";
  }
  return "?";
}

inline const char* name(PointerMode mode) { return mode == PointerMode::kHost ? "host" : "device"; }

// The value whose name is `text`; std::invalid_argument lists the names for anything else.
template <typename Enum>
Enum parse(const char* what, const std::string& text, std::initializer_list<Enum> values) {
  std::string names;
  for (Enum value : values) {
    if (text == name(value)) return value;
    names += (names.empty() ? "" : ", ") + std::string(name(value));
  }
  throw std::invalid_argument(std::string(what) + " must be one of " + names + ", got '" + text +
                              "'");
}

inline ElementType parse_element_type(const std::string& text) {
  return parse(
      "type", text,
      {ElementType::kNvfp4, ElementType::kBf16, ElementType::kFp16, ElementType::kFp8E4m3});
}

inline OutType parse_out_type(const char* what, const std::string& text) {
  return parse(what, text, {OutType::kBf16, OutType::kFp16, OutType::kFp32});
}

inline PointerMode parse_pointer_mode(const std::string& text) {
  return parse("alpha", text, {PointerMode::kHost, PointerMode::kDevice});
}

inline int64_t bytes(OutType type) { return type == OutType::kFp32 ? 4 : 2; }

// "m=37824, n=5376, k=14336": every message about a problem ends with it.
inline std::string shape_text(const Problem& problem) {
  return "m=" + std::to_string(problem.m) + ", n=" + std::to_string(problem.n) +
         ", k=" + std::to_string(problem.k);
}

inline std::string capability_text(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

}  // namespace nvfp4::cublaslt
