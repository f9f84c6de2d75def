#include "jit/diagnostics.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "plait/error.h"

namespace plait::jit {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

enum class Kind { kText, kError, kOther };  // kOther: a warning or note, which ends an error

// A diagnostic of either compiler, "file(3): error: text" or "file:3:14: error: text"; the latter
// is rewritten as the former.
Kind classify(std::string& line) {
  static constexpr std::string_view kErrors[] = {"): error",    "): catastrophic error",
                                                 ": error:",    ": fatal error:",
                                                 "ptxas error", "ptxas fatal"};
  static constexpr std::string_view kOthers[] = {
      "): warning", ": warning:", ": note:", "): note", "): remark", "ptxas info", "ptxas warning"};
  Kind kind = Kind::kText;
  for (const std::string_view word : kErrors) {
    if (line.find(word) != std::string::npos) kind = Kind::kError;
  }
  if (kind == Kind::kText) {
    for (const std::string_view word : kOthers) {
      if (line.find(word) != std::string::npos) kind = Kind::kOther;
    }
  }
  if (kind != Kind::kError) return kind;
  const size_t colon = line.find(':');
  size_t end = colon;
  if (colon != std::string::npos && colon > 0 && line[colon - 1] != ')') {
    const size_t digits = colon + 1;
    for (end = digits; end < line.size() && std::isdigit(static_cast<unsigned char>(line[end]));) {
      ++end;
    }
    if (end > digits && end < line.size() && line[end] == ':') {
      const std::string number = line.substr(digits, end - digits);
      const size_t message = line.find(": ", end);
      if (message != std::string::npos) {
        line = concat(line.substr(0, colon), "(", number, ")", line.substr(message));
      }
    }
  }
  return kind;
}

bool in_user_file(const std::string& line, const std::vector<std::string>& files) {
  return std::any_of(files.begin(), files.end(), [&](const std::string& file) {
    return line.starts_with(file + "(") || line.starts_with("\"" + file + "\"");
  });
}

// The header that an error says is missing; empty if it says something else.
std::string missing_header(const std::string& line) {
  for (const std::string_view phrase :
       {"could not open source file ", "cannot open source file "}) {
    const size_t at = line.find(phrase);
    if (at == std::string::npos) continue;
    const size_t begin = line.find('"', at);
    const size_t end = begin == std::string::npos ? begin : line.find('"', begin + 1);
    if (end != std::string::npos) return line.substr(begin + 1, end - begin - 1);
  }
  const size_t at = line.find(": No such file or directory");  // g++
  const size_t other = line.find("' file not found");          // clang++
  if (at != std::string::npos) {
    const size_t begin = line.rfind(": ", at - 1);
    if (begin != std::string::npos) return line.substr(begin + 2, at - begin - 2);
  }
  if (other != std::string::npos) {
    const size_t begin = line.rfind('\'', other - 1);
    if (begin != std::string::npos) return line.substr(begin + 1, other - begin - 1);
  }
  return {};
}

constexpr size_t kMaxLineLength = 300;  // a template's name can fill a screen

std::string shortened(const std::string& line) {
  return line.size() <= kMaxLineLength ? line : line.substr(0, kMaxLineLength) + " ...";
}

}  // namespace

std::vector<std::string> user_files(const std::string& text) {
  std::vector<std::string> files;
  for (const std::string& line : lines_of(text)) {
    if (!line.starts_with("#line 1 \"") || line.size() < 10) continue;
    files.push_back(line.substr(9, line.size() - 10));
  }
  return files;
}

std::string first_error(const std::string& log, const std::vector<std::string>& user_files) {
  std::vector<std::string> lines = lines_of(log);
  std::vector<Kind> kinds;
  for (std::string& line : lines) kinds.push_back(classify(line));
  size_t first = lines.size();
  int num_errors = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (kinds[i] != Kind::kError) continue;
    ++num_errors;
    const bool better = first < lines.size() && !in_user_file(lines[first], user_files) &&
                        in_user_file(lines[i], user_files);
    if (first == lines.size() || better) first = i;
  }
  if (first == lines.size()) {  // nothing that we know: the end of it
    std::string text;
    for (size_t i = lines.size() > 5 ? lines.size() - 5 : 0; i < lines.size(); ++i) {
      text += (text.empty() ? "" : "\n  ") + shortened(lines[i]);
    }
    return text.empty() ? "the compiler gave no message" : text;
  }
  std::string text = shortened(lines[first]);
  for (size_t i = first + 1; i < lines.size() && i <= first + 4 && kinds[i] == Kind::kText; ++i) {
    const bool blank = lines[i].find_first_not_of(" \t\r") == std::string::npos;
    if (blank || lines[i].find("compilation terminated") != std::string::npos) break;
    if (lines[i].find("error detected in the compilation") != std::string::npos) break;
    text += "\n  " + shortened(lines[i]);
  }
  if (const std::string header = missing_header(lines[first]); !header.empty()) {
    text += concat("\n  the header '", header,
                   "' was not found: plait's own headers are named from kernels/, such as "
                   "\"host_device/base.h\"; others must be where the compiler looks");
  }
  if (num_errors > 1) text += concat("\n  and ", num_errors - 1, " more");
  return text;
}

}  // namespace plait::jit
