// Runs a program without a shell, feeds it text and collects what it prints.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace plait {

struct ProcessResult {
  bool started = false;
  std::string why_not;  // !started: what posix_spawn said
  int exit_code = 0;    // valid if signal == 0
  int signal = 0;       // that ended it
  std::string output;   // stdout and stderr together
  bool ok() const { return started && signal == 0 && exit_code == 0; }
};

// arguments[0] is looked up in PATH.
ProcessResult run_process(const std::vector<std::string>& arguments, std::string_view input = {});

}  // namespace plait
