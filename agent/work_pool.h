#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"

namespace tensorbus::agent {

/// Counts callbacks that somebody else still owes us, so that what they touch can be kept until
/// they have run. Thread-safe.
class Outstanding {
 public:
  void Add() {
    MutexLock lock(mutex_);
    ++count_;
  }
  void Remove() {
    MutexLock lock(mutex_);
    if (--count_ == 0) none_.NotifyAll();
  }
  /// Waits until there are none; for an agent that stops, under its StopGuard.
  void Wait() {
    MutexLock lock(mutex_);
    while (count_ != 0) none_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar none_;
  std::size_t count_ TB_GUARDED_BY(mutex_) = 0;
};

/// A few named threads for work that would block the executor: planning, mapping, copying.
///
/// Tasks start in the order submitted. The queue holds a bounded number per rank or session, since
/// each of these waits for its work before it submits more.
///
/// Threads: thread-safe. The destructor lets running tasks end and drops queued ones.
class WorkPool {
 public:
  using Task = std::function<void()>;

  WorkPool(const std::string& name, std::uint32_t thread_count);
  ~WorkPool();
  WorkPool(const WorkPool&) = delete;
  WorkPool& operator=(const WorkPool&) = delete;

  void Submit(Task task);

  /// Runs every task, then posts `done` to `executor`. With no tasks, `done` is posted at once.
  void SubmitAll(std::vector<Task> tasks, Executor& executor, Task done);

  std::uint32_t thread_count() const { return static_cast<std::uint32_t>(threads_.size()); }

  /// Drops what is queued, lets running tasks end, joins. Idempotent; not from a task.
  void Stop();

 private:
  void Run();

  Mutex mutex_;
  CondVar wake_;
  std::deque<Task> tasks_ TB_GUARDED_BY(mutex_);
  bool stopping_ TB_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace tensorbus::agent
