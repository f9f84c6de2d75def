// What the tests of run-time compilation share: environment variables for one scope, a folder for
// one test, work in child processes.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "base/files.h"
#include "plait/error.h"
#include "plait/variant.h"

namespace plait::testing {

// Sets (or, with "", unsets) variables until the end of the scope.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(std::initializer_list<std::pair<const char*, std::string>> values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name);
      old_[name] = old ? std::optional<std::string>(old) : std::nullopt;
      set(name, value.empty() ? std::nullopt : std::optional<std::string>(value));
    }
  }
  ~ScopedEnvironment() {
    for (const auto& [name, value] : old_) set(name, value);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  static void set(const std::string& name, const std::optional<std::string>& value) {
    value ? setenv(name.c_str(), value->c_str(), 1) : unsetenv(name.c_str());
  }
  std::map<std::string, std::optional<std::string>> old_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A shell script as a stand-in for a compiler.
inline std::string write_script(const std::string& path, const std::string& body) {
  write_text(path, "#!/bin/sh\n" + body);
  if (std::system(("chmod +x " + path).c_str()) != 0) fail("chmod ", path);
  return path;
}

// Runs `work` in a child process; the child exits with what it returns, 99 if it throws.
inline pid_t start_child(const std::function<int()>& work) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  int code = 99;
  try {
    code = work();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "child: %s\n", e.what());
  }
  _exit(code);
}
inline int wait_for(pid_t pid) {  // exit code; -signal
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

// The message of the exception that `f` throws; "" if it throws none.
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
inline int count_lines(const std::string& text) {
  int lines = 1;
  for (const char c : text) lines += c == '\n';
  return lines;
}

// A variant whose logits_transform adds `bias`, the parameter, and `constant`, part of its text, so
// that each constant is a fresh variant.
inline Variant bias_variant(int constant) {
  return custom(
      "bias", "Bias",
      concat("struct Bias {\n  PLAIT_HD static float logits_transform(const Params& p, const "
             "LogitContext&, float x) {\n    return x + p.bias + ",
             constant, ";\n  }\n};\n"),
      {{"bias", VariantParam::kFloat, 0}});
}

}  // namespace plait::testing
