// The one table of the environment variables that plait reads. Nothing else calls getenv.
#pragma once
#include <optional>
#include <string>

namespace plait {

// The variable's value; nothing if it is not set or empty. `name` must be in the table
// (environment.cc), which plait doctor prints.
std::optional<std::string> environment(const char* name);

}  // namespace plait
