#include "variants/functors.h"

#include <algorithm>
#include <cctype>

#include "plait/error.h"

namespace plait {
namespace {

bool starts_word(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_'; }
bool in_word(char c) { return starts_word(c) || std::isdigit(static_cast<unsigned char>(c)); }

struct Word {
  std::string_view text;
  size_t begin;
  char next;  // first character after it that is no space; 0 at the end
};

// Words of text without comments.
std::vector<Word> words_of(std::string_view text) {
  std::vector<Word> words;
  for (size_t i = 0; i < text.size();) {
    if (!in_word(text[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < text.size() && in_word(text[end])) ++end;
    size_t next = end;
    while (next < text.size() && std::isspace(static_cast<unsigned char>(text[next]))) ++next;
    words.push_back({text.substr(i, end - i), i, next < text.size() ? text[next] : '\0'});
    i = end;
  }
  return words;
}

bool is_functor(std::string_view name) {
  return std::find(std::begin(kFunctorNames), std::end(kFunctorNames), name) !=
         std::end(kFunctorNames);
}

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// The functor that `name` was meant to be: at most two letters away; null if none.
const char* meant_functor(std::string_view name) {
  for (const char* functor : kFunctorNames) {
    const int distance = edit_distance(name, functor);
    if (distance > 0 && distance <= 2) return functor;
  }
  return nullptr;
}

std::string all_functors() {
  std::string text;
  for (const char* name : kFunctorNames) text += concat(text.empty() ? "" : ", ", name);
  return text;
}

int line_at(std::string_view text, size_t at) {
  return 1 + static_cast<int>(std::count(text.begin(), text.begin() + at, '\n'));
}

}  // namespace

std::string without_comments(std::string_view source) {
  std::string text(source);
  const auto blank = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end && i < text.size(); ++i) {
      if (text[i] != '\n') text[i] = ' ';
    }
  };
  size_t i = 0;
  while (i < text.size()) {
    const std::string_view rest = source.substr(i);
    size_t end = i + 1;
    if (rest.starts_with("//")) {
      end = std::min(source.find('\n', i), source.size());
      blank(i, end);
    } else if (rest.starts_with("/*")) {
      const size_t close = source.find("*/", i + 2);
      end = close == std::string_view::npos ? source.size() : close + 2;
      blank(i, end);
    } else if (rest[0] == '"' || (rest[0] == '\'' && (i == 0 || !in_word(source[i - 1])))) {
      while (end < source.size() && source[end] != rest[0] && source[end] != '\n') {
        end += source[end] == '\\' ? 2 : 1;
      }
      end = std::min(end + 1, source.size());
      if (end > i + 2) blank(i + 1, end - 1);  // quotes stay: #include "x" keeps its shape
    }
    i = end;
  }
  return text;
}

bool is_identifier(std::string_view name) {
  static constexpr const char* kKeywords[] = {
      "alignas",   "alignof",   "and",       "asm",       "auto",     "bool",     "break",
      "case",      "catch",     "char",      "class",     "concept",  "const",    "consteval",
      "constexpr", "constinit", "continue",  "decltype",  "default",  "delete",   "do",
      "double",    "else",      "enum",      "explicit",  "export",   "extern",   "false",
      "float",     "for",       "friend",    "goto",      "if",       "inline",   "int",
      "long",      "mutable",   "namespace", "new",       "noexcept", "not",      "nullptr",
      "operator",  "or",        "private",   "protected", "public",   "register", "requires",
      "return",    "short",     "signed",    "sizeof",    "static",   "struct",   "switch",
      "template",  "this",      "throw",     "true",      "try",      "typedef",  "typeid",
      "typename",  "union",     "unsigned",  "using",     "virtual",  "void",     "volatile",
      "while",     "xor"};
  if (name.empty() || !starts_word(name[0])) return false;
  if (!std::all_of(name.begin(), name.end(), in_word)) return false;
  return std::find(std::begin(kKeywords), std::end(kKeywords), name) == std::end(kKeywords);
}

std::vector<std::string> functors_in(std::string_view source) {
  const std::string text = without_comments(source);
  const std::vector<Word> words = words_of(text);
  std::vector<std::string> found;
  for (const char* name : kFunctorNames) {
    const auto defines = [&](const Word& w) { return w.text == name && w.next == '('; };
    if (std::any_of(words.begin(), words.end(), defines)) found.push_back(name);
  }
  return found;
}

bool computes_powers_in(std::string_view source) {
  static constexpr std::string_view kFunctions[] = {"exp",  "exp2",       "log2",
                                                    "tanh", "reciprocal", "reciprocal_sqrt"};
  const std::string text = without_comments(source);
  const std::vector<Word> words = words_of(text);
  return std::any_of(words.begin(), words.end(), [](const Word& word) {
    return word.next == '(' && std::find(std::begin(kFunctions), std::end(kFunctions), word.text) !=
                                   std::end(kFunctions);
  });
}

void check_source(const std::string& where, const std::string& struct_name,
                  std::string_view source) {
  const std::string text = without_comments(source);
  const std::vector<Word> words = words_of(text);
  bool defines_struct = false;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i].text != "struct") continue;
    defines_struct |= words[i + 1].text == struct_name;
    check(words[i + 1].text != "Params", where, ": line ", line_at(text, words[i].begin),
          " of the source defines struct Params; leave it out: it is written from the parameters "
          "that the variant declares");
  }
  check(defines_struct, where, ": the source does not define struct ", struct_name);
  for (const Word& word : words) {
    if (word.next != '(' || is_functor(word.text)) continue;
    const char* meant = meant_functor(word.text);
    check(meant == nullptr, where, ": line ", line_at(text, word.begin), " of the source has ",
          word.text, "(), which is no functor; is ", meant ? meant : "",
          " meant? The functors are ", all_functors());
  }
  check(!functors_in(source).empty(), where, ": the source defines none of the functors ",
        all_functors());
}

int line_of_ptx(std::string_view source) {
  const std::string text = without_comments(source);
  const std::vector<Word> words = words_of(text);
  int line = 0;
  for (const Word& word : words) {
    if (word.text == "__CUDA_ARCH__" || word.text == "__CUDACC__")
      return 0;  // the user's own guard
    const bool is_asm = word.text == "asm" || word.text == "__asm__" || word.text == "__asm";
    if (is_asm && line == 0) line = line_at(text, word.begin);
  }
  return line;
}

}  // namespace plait
