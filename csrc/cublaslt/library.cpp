#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

namespace nvfp4::cublaslt {
namespace {

// Every 13.x has this name, so a successful load says nothing about the version.
constexpr const char* kSoname = "libcublasLt.so.13";
constexpr size_t kOldest = 130000;
constexpr size_t kTooNew = 140000;  // the next major release may change structures and enums

std::string mapped_path(void* handle) {
  link_map* map = nullptr;
  return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

std::string fallback_path;  // set before the first load, by the importing thread

void* open_default() {
  // Torch's copy first: a second one would have its own kernels and its own state.
  void* handle = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD);
  if (!handle) handle = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (!handle && !fallback_path.empty())
    handle = dlopen(fallback_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return handle;
}

}  // namespace

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string Library::name(cublasStatus_t status) const {
  const std::string name = cublasLtGetStatusName(status);
  if (name.rfind("CUBLAS_STATUS_", 0) == 0) return name;
  return "cublasStatus_t " + std::to_string(static_cast<int>(status));
}

void set_fallback_path(const std::string& path) { fallback_path = path; }

Loaded load_library(const std::string& path) {
  std::string wanted = path;
  if (wanted.empty()) {
    if (const char* override_path = std::getenv("NVFP4_CUBLASLT_LIBRARY")) wanted = override_path;
  }
  void* handle = wanted.empty() ? open_default() : dlopen(wanted.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* error = dlerror();
    return {nullptr, "cuBLASLt could not be loaded: " +
                         std::string(error ? error : "dlopen gave no reason") +
                         ": install nvidia-cublas>=13.0,<14, or name the library in "
                         "NVFP4_CUBLASLT_LIBRARY"};
  }

  auto library = std::make_shared<Library>();
  library->path = mapped_path(handle);
  auto get_version =
      reinterpret_cast<decltype(&::cublasLtGetVersion)>(dlsym(handle, "cublasLtGetVersion"));
  if (get_version) library->version = get_version();
  const std::string which = "cuBLASLt " +
                            (get_version ? version_text(library->version) : "of unknown version") +
                            " (" + library->path + ")";

  std::string missing = get_version ? "" : "cublasLtGetVersion";
#define NVFP4_RESOLVE(symbol)                                                      \
  library->symbol = reinterpret_cast<decltype(&::symbol)>(dlsym(handle, #symbol)); \
  if (!library->symbol) missing += (missing.empty() ? "" : ", ") + std::string(#symbol);
  NVFP4_CUBLASLT_SYMBOLS(NVFP4_RESOLVE)
#undef NVFP4_RESOLVE
  if (!missing.empty()) {
    return {nullptr, which + " is older than the symbols need: it lacks " + missing +
                         ": install nvidia-cublas>=13.0,<14"};
  }
  if (library->version < kOldest || library->version >= kTooNew) {
    return {nullptr, which +
                         " is outside the versions this build can drive, 13.0 up to, not "
                         "including, 14.0: install nvidia-cublas>=13.0,<14"};
  }
  return {library, ""};
}

}  // namespace nvfp4::cublaslt
