// The CPU backend's threads: every task once, whatever the number of threads and callers; a child
// of fork works.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "plait/error.h"

namespace plait::cpu {
namespace {

// How often each of `num_tasks` tasks was called; fails if a thread's index is out of range.
std::vector<int> calls(ThreadPool& pool, int num_tasks, int max_threads) {
  std::vector<std::atomic<int>> counts(num_tasks);
  std::atomic<int> bad_threads{0};
  const int limit = max_threads == 0 ? pool.num_threads() : max_threads;
  pool.run(num_tasks, max_threads, [&](int i, int thread) {
    ++counts[i];
    bad_threads += thread < 0 || thread >= std::min(limit, pool.num_threads());
  });
  EXPECT_EQ(bad_threads, 0);
  return {counts.begin(), counts.end()};
}

TEST(ThreadPool, EveryTaskOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (const int num_tasks : {0, 1, 2, 7, 1000}) {
      for (const int max_threads : {0, 1, 2, 9}) {
        EXPECT_EQ(calls(pool, num_tasks, max_threads), std::vector<int>(num_tasks, 1));
      }
    }
  }
}

TEST(ThreadPool, ManyShortJobsInARow) {
  ThreadPool pool(3);
  for (int n = 0; n < 3000; ++n) ASSERT_EQ(calls(pool, 3, 0), std::vector<int>(3, 1)) << n;
}

TEST(ThreadPool, SeveralCallers) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int n = 0; n < 300; ++n) {
        std::vector<std::atomic<int>> counts(20);
        pool.run(20, 0, [&](int i, int) { ++counts[i]; });
        for (const auto& count : counts) wrong += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, TheChildOfForkHasAPoolOfItsOwn) {
  std::atomic<int> sum{0};
  const auto work = [&] { thread_pool().run(100, 0, [&](int i, int) { sum += i; }); };
  work();
  ThreadPool* const of_parent = &thread_pool();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a child that waits for threads it does not have would wait for ever
    // Objects made before the fork keep the parent's pool: it must work, on this thread alone.
    of_parent->run(100, 0, [&](int i, int) { sum += i; });
    work();
    _exit(sum == 3 * 4950 && &thread_pool() != of_parent ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(ThreadPool, NumberOfThreadsFromTheEnvironment) {
  const char* before = std::getenv("PLAIT_NUM_THREADS");
  const std::string kept = before != nullptr ? before : "";
  setenv("PLAIT_NUM_THREADS", "3", 1);
  EXPECT_EQ(num_threads_wanted(), 3);
  for (const char* bad : {"0", "-1", "two", "3x", "1025"}) {
    setenv("PLAIT_NUM_THREADS", bad, 1);
    try {
      num_threads_wanted();
      ADD_FAILURE() << bad << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), concat("environment: PLAIT_NUM_THREADS is '", bad,
                                                  "', but takes a number in 1 ... 1024"));
    }
  }
  if (before != nullptr) {
    setenv("PLAIT_NUM_THREADS", kept.c_str(), 1);
  } else {
    unsetenv("PLAIT_NUM_THREADS");
  }
  EXPECT_GE(num_threads_wanted(), 1);
}

}  // namespace
}  // namespace plait::cpu
