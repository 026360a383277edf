// Text as a JSON string. The one piece of JSON that the ladder's explain shares with a plan's.
#pragma once

#include <string>

namespace nvfp4::cublaslt {

std::string quoted(const std::string& text);

}  // namespace nvfp4::cublaslt
