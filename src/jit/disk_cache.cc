#include "jit/disk_cache.h"

#include <algorithm>
#include <filesystem>

#include "base/environment.h"
#include "base/files.h"
#include "base/hash.h"
#include "plait/error.h"
#include "plait/jit.h"

namespace plait::jit {
namespace {

// "PLAITART" + payload size in 16 hex digits + checksum in 32, at the end of an artefact.
constexpr std::string_view kMagic = "PLAITART";
constexpr size_t kTrailerBytes = 8 + 16 + 32;

std::string trailer(std::string_view payload) {
  std::string size(16, '0');
  size_t rest = payload.size();
  for (int i = 15; i >= 0; --i, rest >>= 4) size[i] = "0123456789abcdef"[rest & 15];
  return std::string(kMagic) + size + hash_of(payload);
}

bool is_whole(std::string_view bytes) {
  if (bytes.size() < kTrailerBytes) return false;
  const size_t payload = bytes.size() - kTrailerBytes;
  return bytes.substr(payload) == trailer(bytes.substr(0, payload));
}

struct Choice {
  std::string dir;     // the folder, whether or not it can be written; "": none
  std::string reason;  // "PLAIT_CACHE_DIR=/x", or why there is none
};

// The first variable that is set decides: a folder that was asked for and cannot be written is not
// replaced by another behind the user's back.
Choice choose() {
  if (const auto dir = environment("PLAIT_CACHE_DIR")) return {*dir, "PLAIT_CACHE_DIR=" + *dir};
  if (const auto dir = environment("XDG_CACHE_HOME")) {
    return {*dir + "/plait", "XDG_CACHE_HOME=" + *dir};
  }
  if (const auto dir = environment("HOME")) return {*dir + "/.cache/plait", "HOME=" + *dir};
  return {"", "none of PLAIT_CACHE_DIR, XDG_CACHE_HOME and HOME is set"};
}

bool is_ours(const std::string& name) {  // <32 hex digits>.<cubin|so|log>[...tmp], failed or not
  if (name.size() < 34 || name[32] != '.') return false;
  const bool hex = std::all_of(name.begin(), name.begin() + 32, [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
  const std::string rest = name.substr(33);
  return hex && (rest.starts_with("cubin") || rest.starts_with("so") || rest.starts_with("log"));
}

}  // namespace

std::optional<std::string> cache_load(const std::string& file) {
  const Choice choice = choose();
  if (choice.dir.empty()) return std::nullopt;
  std::optional<std::string> bytes = read_file(concat(choice.dir, "/", file));
  if (!bytes || !is_whole(*bytes)) return std::nullopt;
  bytes->resize(bytes->size() - kTrailerBytes);
  return bytes;
}

std::optional<std::string> cache_find(const std::string& file) {
  if (!cache_load(file)) return std::nullopt;
  return concat(choose().dir, "/", file);
}

bool cache_store(const std::string& file, std::string_view bytes) {
  const std::string dir = cache_dir();
  if (dir.empty()) return false;
  std::string artefact(bytes);
  artefact += trailer(bytes);
  return write_file_atomically(concat(dir, "/", file), artefact);
}

std::string keep_log(const std::string& key, std::string_view log, std::string_view source) {
  std::string dir = environment("PLAIT_JIT_KEEP").value_or("");
  if (dir.empty() || !make_writable_dir(dir)) dir = cache_dir();
  if (dir.empty()) return "";
  const std::string path = concat(dir, "/", key, ".log");
  const std::string text = concat(log, "\n--- source ---\n", source);
  return write_file_atomically(path, text) ? path : "";
}

void keep_artefact(const std::string& name, const std::string& extension, std::string_view bytes) {
  const auto dir = environment("PLAIT_JIT_KEEP");
  if (!dir) return;
  std::string why;
  if (!make_writable_dir(*dir, &why)) fail("PLAIT_JIT_KEEP=", *dir, " cannot be written: ", why);
  std::string file = name;
  for (char& c : file) {
    if (c == ' ' || c == '/' || c == '|') c = '_';
  }
  write_file_atomically(concat(*dir, "/", file, ".", extension), bytes);
}

}  // namespace plait::jit

namespace plait {

std::string cache_dir() {
  const std::string dir = jit::choose().dir;
  return !dir.empty() && make_writable_dir(dir) ? dir : "";
}

std::string cache_dir_reason() {
  const jit::Choice choice = jit::choose();
  std::string why;
  if (choice.dir.empty()) return concat("memory only: ", choice.reason);
  if (make_writable_dir(choice.dir, &why)) return choice.reason;
  return concat("memory only: ", choice.reason, " cannot be written (", why, ")");
}

long long clear_cache() {
  const std::string dir = jit::choose().dir;
  long long num_removed = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    if (!jit::is_ours(entry.path().filename().string())) continue;
    std::error_code failed;
    if (std::filesystem::remove(entry.path(), failed)) ++num_removed;
  }
  return num_removed;
}

}  // namespace plait
