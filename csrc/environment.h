// An environment variable that may be set at any time, asked for in every call.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <vector>

namespace nvfp4 {

// For one thread. getenv reads through the text of all variables, which takes the host 0.3 us where
// there are 88; this reads their addresses, and text only where one of those has changed, besides
// its own variable's name: putenv's strings are their owner's, who may give them other text.
class EnvironmentVariable {
 public:
  explicit EnvironmentVariable(const char* name) : name_(name), length_(std::strlen(name)) {}

  // Null where it is not set.
  const char* text() {
    char** const entries = environ;  // once, and each address in it: others may set variables
    if (entries == nullptr) return nullptr;
    if (seen_.empty() || moved(entries) || renamed()) look(entries);
    return text_;
  }

 private:
  bool moved(char** entry) const {
    const char* const* seen = seen_.data();
    for (; *entry == *seen; ++entry, ++seen) {
      if (*seen == nullptr) return false;
    }
    return true;
  }

  bool renamed() const { return text_ != nullptr && !is_own(text_ - length_ - 1); }

  void look(char* const volatile* entry) {
    seen_.clear();
    text_ = nullptr;
    for (;; ++entry) {
      const char* const variable = *entry;
      seen_.push_back(variable);
      if (variable == nullptr) return;
      if (text_ == nullptr && is_own(variable)) text_ = variable + length_ + 1;
    }
  }

  bool is_own(const char* variable) const {
    return std::strncmp(variable, name_, length_) == 0 && variable[length_] == '=';
  }

  const char* name_;
  size_t length_;
  const char* text_ = nullptr;
  std::vector<const char*> seen_;  // with the null at the end
};

}  // namespace nvfp4
