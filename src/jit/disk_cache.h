// The folder of compiled artefacts. A file appears by rename only, ends with its size and checksum,
// and needs no lock: whoever finds none, or a broken one, builds it, and losing a race is harmless.
// Chosen anew at every call, so that a folder that disappears under a running process comes back.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace plait::jit {

// The contents of <cache>/<file>; nothing if it is missing or broken.
std::optional<std::string> cache_load(const std::string& file);
// The path of <cache>/<file> if it is whole: for dlopen, which ignores what follows an ELF file.
std::optional<std::string> cache_find(const std::string& file);
// Whether the artefact was stored; if not it lives in memory only.
bool cache_store(const std::string& file, std::string_view bytes);

// Where the text of a failed build goes, for the error message: PLAIT_JIT_KEEP or the cache folder;
// "" if neither can be written.
std::string keep_log(const std::string& key, std::string_view log, std::string_view source);
// With PLAIT_JIT_KEEP set, keeps <name>.<extension> there.
void keep_artefact(const std::string& name, const std::string& extension, std::string_view bytes);

}  // namespace plait::jit
