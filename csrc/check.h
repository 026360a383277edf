// Argument checks. A failed one names the argument, what was expected, what it got, and a remedy.
// NVFP4_CHECK reaches Python as ValueError, NVFP4_CHECK_TYPE as TypeError.
#pragma once

#include <dlfcn.h>

#include <sstream>
#include <stdexcept>
#include <string>

// torch translates C++ exceptions with pybind11, which makes a ValueError of std::invalid_argument
// but a TypeError only of its own class; that one is recognised by its name, and sets the error
// itself. So this is its declaration, which spares the ops a dependency on Python: whoever doesn't
// know it sees a std::runtime_error.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace nvfp4 {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

class __attribute__((visibility("default"))) TypeError : public pybind11::builtin_exception {
 public:
  using builtin_exception::builtin_exception;

  void set_error() const override {
    // Of the process's Python: only that calls this.
    const auto set_string =
        reinterpret_cast<void (*)(void*, const char*)>(dlsym(RTLD_DEFAULT, "PyErr_SetString"));
    const auto type = static_cast<void**>(dlsym(RTLD_DEFAULT, "PyExc_TypeError"));
    if (set_string && type) set_string(*type, what());
  }
};

}  // namespace nvfp4

// The message is only put together when the check fails.
#define NVFP4_CHECK_AS(Exception, condition, ...)                    \
  do {                                                               \
    if (!(condition)) throw Exception(::nvfp4::concat(__VA_ARGS__)); \
  } while (0)
#define NVFP4_CHECK(condition, ...) NVFP4_CHECK_AS(std::invalid_argument, condition, __VA_ARGS__)
#define NVFP4_CHECK_TYPE(condition, ...) NVFP4_CHECK_AS(::nvfp4::TypeError, condition, __VA_ARGS__)
