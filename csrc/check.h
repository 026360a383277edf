// Argument checks. A failed one names the argument, what was expected, what it got, and a remedy.
// std::invalid_argument reaches Python as ValueError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace nvfp4 {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace nvfp4

// The message is only put together when the check fails.
#define NVFP4_CHECK(condition, ...)                                              \
  do {                                                                           \
    if (!(condition)) throw std::invalid_argument(::nvfp4::concat(__VA_ARGS__)); \
  } while (0)
