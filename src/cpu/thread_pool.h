// The threads of the CPU backend: asleep until there is work, which they take task by task from one
// counter. One pool a process. About 2 us a call with workers to wake; OpenMP would bring a second
// runtime beside torch's and trouble after fork.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace plait::cpu {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // the caller of run() is one of them
  ~ThreadPool();
  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i, thread) once for every i < num_tasks, on at most max_threads threads (0: all) of
  // index thread < num_threads(); returns when all are done. Tasks must not throw. While another
  // thread's run() is under way, everything runs on the caller as thread 0.
  template <class Task>
  void run(int num_tasks, int max_threads, const Task& task) {
    run_job({[](const void* context, int i, int thread) {
               (*static_cast<const Task*>(context))(i, thread);
             },
             &task, num_tasks, max_threads == 0 ? num_threads() : max_threads});
  }

 private:
  struct Job {
    void (*call)(const void* context, int i, int thread) = nullptr;
    const void* context = nullptr;
    int num_tasks = 0, max_threads = 0;
  };
  void run_job(const Job& job);
  void take_tasks(const Job& job, int thread);
  void stop();
  void work(int thread);

  std::vector<std::thread> workers_;
  std::mutex callers_;  // held by the one caller whose job the workers serve
  std::mutex mutex_;    // guards what follows
  std::condition_variable wake_, done_;
  Job job_;  // call is null while there is none, or none to join any more
  long long generation_ = 0;
  int num_running_ = 0;  // workers inside the job
  bool stopping_ = false;
  std::atomic<int> next_task_{0};
};

// PLAIT_NUM_THREADS, else the cores this process may use. Throws Error if it is no number in 1 ...
// 1024.
int num_threads_wanted();

// The process's pool, made at first use. A child of fork() makes its own: threads do not survive.
ThreadPool& thread_pool();

}  // namespace plait::cpu
