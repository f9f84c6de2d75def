#include "base/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

extern char** environ;

namespace plait {
namespace {

// Both pipes in one loop: a program that prints while it still reads must not block either side.
void exchange(int to_child, int from_child, std::string_view input, std::string& output) {
  if (input.empty()) {
    close(to_child);
    to_child = -1;
  }
  char buffer[1 << 14];
  while (true) {
    pollfd fds[2] = {{from_child, POLLIN, 0}, {to_child, POLLOUT, 0}};
    if (poll(fds, to_child >= 0 ? 2 : 1, -1) < 0 && errno != EINTR) break;
    if (to_child >= 0 && fds[1].revents != 0) {
      // MSG_NOSIGNAL: a child that died leaves an error here, not SIGPIPE in the whole process.
      const ssize_t n = send(to_child, input.data(), input.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) input.remove_prefix(n);
      if (input.empty() || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        close(to_child);
        to_child = -1;
      }
    }
    if (fds[0].revents != 0) {
      const ssize_t n = read(from_child, buffer, sizeof buffer);
      if (n > 0) output.append(buffer, n);
      if (n == 0 || (n < 0 && errno != EINTR)) break;
    }
  }
  if (to_child >= 0) close(to_child);
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& arguments, std::string_view input) {
  ProcessResult result;
  int in[2], out[2];  // [0] ours, [1] the child's
  // A socket for stdin, because a pipe cannot be told to do without SIGPIPE.
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in) != 0) {
    result.why_not = std::strerror(errno);
    return result;
  }
  if (pipe2(out, O_CLOEXEC) != 0) {
    result.why_not = std::strerror(errno);
    close(in[0]);
    close(in[1]);
    return result;
  }
  std::vector<char*> argv;
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[1], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  posix_spawn_file_actions_adddup2(&actions, out[1], 2);
  pid_t pid = 0;
  const int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[1]);
  close(out[1]);
  if (error != 0) {
    result.why_not = std::strerror(error);
    close(in[0]);
    close(out[0]);
    return result;
  }
  result.started = true;
  exchange(in[0], out[0], input, result.output);
  close(out[0]);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    result.signal = WTERMSIG(status);
  } else {
    result.exit_code = WEXITSTATUS(status);
  }
  return result;
}

}  // namespace plait
