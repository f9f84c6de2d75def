// Whether `variable` is 1: what `make` sets where a test that would otherwise be skipped, for want
// of a GPU or a toolkit, must fail.
#pragma once
#include <cstdlib>
#include <string_view>

namespace plait::test {

inline bool required(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace plait::test
