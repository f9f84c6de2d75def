#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <charconv>
#include <string>
#include <system_error>

#include "base/environment.h"
#include "plait/error.h"

namespace plait::cpu {

ThreadPool::ThreadPool(int num_threads) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& error) {
    const size_t started = workers_.size() + 1;
    stop();
    fail("cpu: of ", num_threads, " threads only ", started, " could be started (", error.what(),
         "); set PLAIT_NUM_THREADS to fewer");
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::take_tasks(const Job& job, int thread) {
  for (int i; (i = next_task_.fetch_add(1, std::memory_order_relaxed)) < job.num_tasks;) {
    job.call(job.context, i, thread);
  }
}

void ThreadPool::run_job(const Job& job) {
  std::unique_lock caller(callers_, std::defer_lock);
  if (job.num_tasks <= 1 || job.max_threads <= 1 || workers_.empty() || !caller.try_lock()) {
    for (int i = 0; i < job.num_tasks; ++i) job.call(job.context, i, 0);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    job_ = job;
    ++generation_;
    next_task_.store(0, std::memory_order_relaxed);
  }
  wake_.notify_all();
  take_tasks(job, 0);
  std::unique_lock lock(mutex_);
  job_.call = nullptr;  // who has not woken by now need not: nothing is left to take
  done_.wait(lock, [this] { return num_running_ == 0; });
}

void ThreadPool::work(int thread) {
  long long seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] {
      return stopping_ ||
             (job_.call != nullptr && generation_ != seen && thread < job_.max_threads);
    });
    if (stopping_) return;
    seen = generation_;
    const Job job = job_;
    ++num_running_;
    lock.unlock();
    take_tasks(job, thread);
    lock.lock();
    if (--num_running_ == 0) done_.notify_one();
  }
}

int num_threads_wanted() {
  if (const auto text = environment("PLAIT_NUM_THREADS")) {
    int value = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
    if (error != std::errc() || end != text->data() + text->size() || value < 1 || value > 1024) {
      fail("environment: PLAIT_NUM_THREADS is '", *text, "', but takes a number in 1 ... 1024");
    }
    return value;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  const int cores_of_machine = static_cast<int>(std::thread::hardware_concurrency());
  return cores_of_machine > 0 ? cores_of_machine : 1;
}

namespace {
std::mutex pool_mutex;
std::atomic<ThreadPool*> pool{nullptr};  // never destroyed: exit need not wait for sleepers
}  // namespace

ThreadPool& thread_pool() {
  if (ThreadPool* existing = pool.load(std::memory_order_acquire)) return *existing;
  std::lock_guard lock(pool_mutex);
  if (ThreadPool* existing = pool.load(std::memory_order_relaxed)) return *existing;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
  (void)registered;
  ThreadPool* made = new ThreadPool(num_threads_wanted());
  pool.store(made, std::memory_order_release);
  return *made;
}

}  // namespace plait::cpu
