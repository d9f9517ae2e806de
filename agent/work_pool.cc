#include "agent/work_pool.h"

#include <atomic>
#include <fmt/format.h>
#include <memory>
#include <pthread.h>

namespace tensorbus::agent {

WorkPool::WorkPool(const std::string& name, std::uint32_t thread_count) {
  for (std::uint32_t i = 0; i < thread_count; ++i) {
    threads_.emplace_back([this, thread_name = fmt::format("{}-{}", name, i).substr(0, 15)] {
      pthread_setname_np(pthread_self(), thread_name.c_str());
      Run();
    });
  }
}

WorkPool::~WorkPool() {
  Stop();
}

void WorkPool::Submit(Task task) {
  MutexLock lock(mutex_);
  if (stopping_) return;
  tasks_.push_back(std::move(task));
  wake_.NotifyOne();
}

void WorkPool::SubmitAll(std::vector<Task> tasks, Executor& executor, Task done) {
  if (tasks.empty()) return executor.Post(std::move(done));
  auto left = std::make_shared<std::atomic<std::size_t>>(tasks.size());
  auto finish = std::make_shared<Task>(std::move(done));
  for (Task& task : tasks) {
    // The last decrement sees the writes of all other tasks (acq_rel on one counter).
    Submit([left, finish, &executor, work = std::move(task)] {
      work();
      if (left->fetch_sub(1, std::memory_order_acq_rel) == 1) executor.Post(std::move(*finish));
    });
  }
}

void WorkPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    tasks_.clear();
    wake_.NotifyAll();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void WorkPool::Run() {
  for (;;) {
    Task task;
    {
      MutexLock lock(mutex_);
      while (tasks_.empty() && !stopping_) wake_.Wait(mutex_);
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace tensorbus::agent
