#include "base/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/environment.h"
#include "plait/error.h"

namespace plait {
namespace {

bool report(std::string* why, const std::string& path) {  // errno as it stands; always false
  if (why != nullptr) *why = concat(path, ": ", std::strerror(errno));
  return false;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    bytes.remove_prefix(n);
  }
  return true;
}

}  // namespace

std::optional<std::string> read_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::string bytes;
  struct stat info;
  if (fstat(fd, &info) == 0) bytes.reserve(info.st_size);
  char buffer[1 << 16];
  ssize_t n;
  while ((n = read(fd, buffer, sizeof buffer)) > 0 || (n < 0 && errno == EINTR)) {
    if (n > 0) bytes.append(buffer, n);
  }
  close(fd);
  if (n < 0) return std::nullopt;  // a folder, for one
  return bytes;
}

bool write_file_atomically(const std::string& path, std::string_view bytes, std::string* why) {
  static std::atomic<int> counter{0};
  const std::string temporary = concat(path, ".", getpid(), ".", counter++, ".tmp");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return report(why, temporary);
  bool good = write_all(fd, bytes);
  if (!good) report(why, temporary);
  if (close(fd) != 0 && good) good = report(why, temporary);  // a full disk may show here
  if (good && rename(temporary.c_str(), path.c_str()) != 0) good = report(why, path);
  if (!good) unlink(temporary.c_str());
  return good;
}

bool is_directory(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

bool is_readable(const std::string& path) { return access(path.c_str(), R_OK) == 0; }

bool make_writable_dir(const std::string& path, std::string* why) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!is_directory(path)) {
    if (why != nullptr) *why = concat(path, ": ", error ? error.message() : "not a folder");
    return false;
  }
  // access() answers for the real user and knows nothing of read-only mounts' corner cases; writing
  // does.
  const std::string probe = concat(path, "/probe.", getpid(), ".tmp");
  const int fd = open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return report(why, path);
  close(fd);
  unlink(probe.c_str());
  return true;
}

TemporaryDir::TemporaryDir() {
  path_ = concat(environment("TMPDIR").value_or("/tmp"), "/plait-XXXXXX");
  if (mkdtemp(path_.data()) == nullptr) {
    fail("no temporary folder: ", path_, ": ", std::strerror(errno),
         "; set TMPDIR to a folder that can be written");
  }
}

TemporaryDir::~TemporaryDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace plait
