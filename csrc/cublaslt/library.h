// cuBLASLt, loaded at run time: the process's own copy where torch has brought one, so that there
// are never two. A library that is absent, too old or incomplete is a reason to read, not a crash.

#pragma once

#include <cublasLt.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace nvfp4::cublaslt {

#define NVFP4_CUBLASLT_SYMBOLS(X)         \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetStatusName)                \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatmulAlgoGetIds)             \
  X(cublasLtMatmulAlgoInit)               \
  X(cublasLtMatmulAlgoConfigSetAttribute) \
  X(cublasLtMatmulAlgoConfigGetAttribute) \
  X(cublasLtMatmulAlgoCapGetAttribute)    \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmul)

struct Library {
  std::string path;    // of the file that was mapped
  size_t version = 0;  // cublasLtGetVersion: 130100 is 13.1.0
#define NVFP4_DECLARE(symbol) decltype(&::symbol) symbol = nullptr;
  NVFP4_CUBLASLT_SYMBOLS(NVFP4_DECLARE)
#undef NVFP4_DECLARE

  // "CUBLAS_STATUS_ARCH_MISMATCH"; "cublasStatus_t 99" for one this library doesn't know.
  std::string name(cublasStatus_t status) const;
};

struct Loaded {
  std::shared_ptr<const Library> library;  // the table; the code itself is never unloaded
  std::string reason;                      // why library is null
};

// `path` empty: NVFP4_CUBLASLT_LIBRARY where set, else libcublasLt.so.13 as the loader finds it.
Loaded load_library(const std::string& path = "");

// Where to look after NVFP4_CUBLASLT_LIBRARY and the loader's own places: the library of the
// nvidia-cublas package, which no loader path leads to. Before the first load.
void set_fallback_path(const std::string& path);

std::string version_text(size_t version);  // "13.1.0"

// What cuBLASLt answered to one call, when it wasn't success. Stays inside csrc/cublaslt.
struct CallFailed : std::runtime_error {
  CallFailed(const std::string& call, const std::string& status)
      : std::runtime_error(call + " " + status), status(status) {}
  std::string status;
};

inline void expect_success(const Library& library, cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw CallFailed(call, library.name(status));
}

}  // namespace nvfp4::cublaslt
