// Files as the caches need them: whole-file reads, writes that appear by rename or not at all, and
// temporary folders. Nothing here throws: the answer says whether it worked, `why` what was wrong.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace plait {

std::optional<std::string> read_file(const std::string& path);
// Writes `path`.PID.N.tmp, then renames it, so that readers see the old file or the whole new one.
bool write_file_atomically(const std::string& path, std::string_view bytes,
                           std::string* why = nullptr);
// Creates the folder and its parents; true if it is there and files can be created in it.
bool make_writable_dir(const std::string& path, std::string* why = nullptr);
bool is_directory(const std::string& path);
bool is_readable(const std::string& path);

// A folder of our own under $TMPDIR or /tmp, removed with all in it at the end of its life.
class TemporaryDir {
 public:
  TemporaryDir();  // throws Error naming the folder that takes no files
  ~TemporaryDir();
  TemporaryDir(const TemporaryDir&) = delete;
  TemporaryDir& operator=(const TemporaryDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace plait
