#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define TB_THREAD_ANNOTATION_(x) __attribute__((x))
#else
#define TB_THREAD_ANNOTATION_(x)
#endif

#define TB_CAPABILITY(x) TB_THREAD_ANNOTATION_(capability(x))
#define TB_SCOPED_CAPABILITY TB_THREAD_ANNOTATION_(scoped_lockable)
#define TB_GUARDED_BY(x) TB_THREAD_ANNOTATION_(guarded_by(x))
#define TB_REQUIRES(...) TB_THREAD_ANNOTATION_(requires_capability(__VA_ARGS__))
#define TB_ACQUIRE(...) TB_THREAD_ANNOTATION_(acquire_capability(__VA_ARGS__))
#define TB_RELEASE(...) TB_THREAD_ANNOTATION_(release_capability(__VA_ARGS__))
#define TB_EXCLUDES(...) TB_THREAD_ANNOTATION_(locks_excluded(__VA_ARGS__))
#define TB_NO_THREAD_SAFETY_ANALYSIS TB_THREAD_ANNOTATION_(no_thread_safety_analysis)

namespace tensorbus {

/// std::mutex that Clang's -Wthread-safety understands.
class TB_CAPABILITY("mutex") Mutex {
 public:
  void Lock() TB_ACQUIRE() { mutex_.lock(); }
  void Unlock() TB_RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

/// Holds a Mutex for a scope.
class TB_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TB_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() TB_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

/// A condition variable for Mutex. Waits are always in a loop over the condition.
class CondVar {
 public:
  void Wait(Mutex& mutex) TB_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  /// False when `deadline` passed first.
  bool WaitUntil(Mutex& mutex, std::chrono::steady_clock::time_point deadline) TB_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace tensorbus
