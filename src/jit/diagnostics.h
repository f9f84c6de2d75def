// Makes a compiler's log short: the first error in the user's own text, with its line.
#pragma once
#include <string>
#include <vector>

namespace plait::jit {

// Names of user texts in an assembled source: those of its `#line 1 "name"` directives.
std::vector<std::string> user_files(const std::string& text);

// The first error of an NVRTC, g++ or clang++ log, the first in a user file if there is one, as
// "alibi.cuh(3): error: ..." with at most four lines of what belongs to it, and how many errors
// more there are. A missing header is named with what to do. The log's tail if it holds no error.
std::string first_error(const std::string& log, const std::vector<std::string>& user_files);

}  // namespace plait::jit
