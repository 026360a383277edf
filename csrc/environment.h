// An environment variable that may be set at any time, asked for in every call.
#pragma once

#include <unistd.h>

#include <cstring>
#include <vector>

namespace nvfp4 {

// For one thread. getenv reads through the text of all variables, which takes the host 0.3 us where
// there are 88; this reads their addresses, and text only where one of those has changed.
class EnvironmentVariable {
 public:
  explicit EnvironmentVariable(const char* name) : name_(name) {}

  // Null where it is not set.
  const char* text() {
    if (environ == nullptr) return nullptr;
    if (seen_.empty() || moved()) look();
    return text_;
  }

 private:
  bool moved() const {
    const char* const* seen = seen_.data();
    for (char** entry = environ; *entry == *seen; ++entry, ++seen) {
      if (*seen == nullptr) return false;
    }
    return true;
  }

  void look() {
    seen_.clear();
    text_ = nullptr;
    const size_t length = std::strlen(name_);
    for (char** entry = environ;; ++entry) {
      seen_.push_back(*entry);
      if (*entry == nullptr) return;
      const bool found = std::strncmp(*entry, name_, length) == 0 && (*entry)[length] == '=';
      if (found && text_ == nullptr) text_ = *entry + length + 1;
    }
  }

  const char* name_;
  const char* text_ = nullptr;
  std::vector<const char*> seen_;  // with the null at the end
};

}  // namespace nvfp4
