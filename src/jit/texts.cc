#include "jit/texts.h"

#include <algorithm>
#include <set>

#include "base/hash.h"
#include "jit/embedded.h"
#include "plait/error.h"
#include "variants/functors.h"

namespace plait::jit {
namespace {

// The name in `#include "name"`; empty if the line is none.
std::string_view quoted_include(std::string_view line) {
  std::string_view argument = include_on(line).value_or("");
  if (!argument.starts_with('"')) return {};
  argument.remove_prefix(1);
  return argument.substr(0, argument.find('"'));
}

void expand(std::string_view text, std::string file, std::set<std::string>& seen,
            std::string& out) {
  int line_number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size() - 1);
    const std::string_view line = text.substr(0, end + 1);
    text.remove_prefix(end + 1);
    ++line_number;
    const std::string name(quoted_include(line));
    const char* included = name.empty() ? nullptr : embedded_text(name);
    if (included != nullptr) {
      if (!seen.insert(name).second) {
        out += '\n';
        continue;
      }
      out += concat("#line 1 \"", name, "\"\n");
      expand(included, name, seen, out);
      out += concat("#line ", line_number + 1, " \"", file, "\"\n");
    } else if (line.starts_with("#pragma once")) {
      out += '\n';  // g++ warns of it in the main file
    } else {
      out += line;
      if (line.starts_with("#line ")) {  // user text: what follows is counted from there
        int number = 0;
        char name_there[256] = "";
        if (std::sscanf(std::string(line).c_str(), "#line %d \"%255[^\"]\"", &number, name_there) ==
            2) {
          line_number = number - 1;
          file = name_there;
        }
      }
    }
  }
  if (!out.empty() && out.back() != '\n') out += '\n';
}

}  // namespace

std::optional<std::string_view> include_on(std::string_view line) {
  const auto skip_spaces = [&] {
    while (!line.empty() && (line[0] == ' ' || line[0] == '\t')) line.remove_prefix(1);
  };
  skip_spaces();
  if (!line.starts_with('#')) return std::nullopt;
  line.remove_prefix(1);
  skip_spaces();
  if (!line.starts_with("include")) return std::nullopt;
  line.remove_prefix(7);
  skip_spaces();
  return line;
}

bool includes_other_files(const std::string& text) {
  if (text.find("__has_include") != std::string::npos) return true;
  const std::string code = without_comments(text);  // of the same lines and columns
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    // An include with comments among its words is not understood below, and counts as another file.
    if (include_on(std::string_view(code).substr(begin, end - begin))) {
      const std::string_view line = std::string_view(text).substr(begin, end - begin);
      if (embedded_text(std::string(quoted_include(line))) == nullptr) return true;
    }
    begin = end + 1;
  }
  return false;
}

const char* embedded_text(const std::string& name) {
  for (int i = 0; i < kNumEmbeddedFiles; ++i) {
    if (name == kEmbeddedFiles[i].name) return kEmbeddedFiles[i].text;
  }
  return nullptr;
}

const std::string& embedded_hash() {
  static const std::string hash = [] {
    Hash128 all;
    for (int i = 0; i < kNumEmbeddedFiles; ++i) {
      all.add(kEmbeddedFiles[i].name).add(kEmbeddedFiles[i].text);
    }
    return all.hex();
  }();
  return hash;
}

std::string expand_includes(const std::string& text, const std::string& file) {
  std::set<std::string> seen;
  std::string out = concat("#line 1 \"", file, "\"\n");
  expand(text, file, seen, out);
  return out;
}

}  // namespace plait::jit
