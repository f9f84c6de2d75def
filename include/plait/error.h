// How plait refuses: check(condition, parts...) streams its parts into one message that says where,
// what was found, what is allowed, and throws before anything was written or launched.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace plait {

// The caller's argument is at fault (ValueError in Python).
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};
// The environment is at fault: no driver, no compiler, out of memory (RuntimeError in Python).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class... Parts>
void check(bool condition, const Parts&... parts) {  // throws ArgumentError
  if (!condition) [[unlikely]] throw ArgumentError(concat(parts...));
}
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {  // throws Error
  throw Error(concat(parts...));
}

}  // namespace plait
