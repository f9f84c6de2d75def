// The embedded texts as includes: looking one up, expanding them into one self-contained text for
// the host compiler, and the hash of them all, which is part of every cache key.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace plait::jit {

const char* embedded_text(const std::string& name);  // null if there is none
const std::string& embedded_hash();

// What stands after `#include` on a line: `"name"`, `<name>` or a macro, whatever blanks there are;
// nothing if the line is no include.
std::optional<std::string_view> include_on(std::string_view line);

// Whether `text` includes, or asks for, a file that is not embedded. What is compiled then depends
// on more than cache keys hold, so that it goes into no cache.
bool includes_other_files(const std::string& text);

// `text` with every `#include "name"` of an embedded file replaced by its text, each once, in the
// order of a compiler with #pragma once. #line directives keep errors pointing into the files they
// came from; `file` names the text itself. Other includes stay as they are.
std::string expand_includes(const std::string& text, const std::string& file);

}  // namespace plait::jit
