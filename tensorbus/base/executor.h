#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tensorbus/base/clock.h"

namespace tensorbus {

/// Runs tasks one after the other on one thread: the home of a state machine. Thread-safe.
///
/// Tasks run in the order posted; timed ones when due. A task must not block. Tasks still queued
/// when the executor stops are dropped without running.
class Executor {
 public:
  using Task = std::function<void()>;
  using TimerId = std::uint64_t;

  virtual ~Executor() = default;

  virtual void Post(Task task) = 0;
  /// Runs `task` at or after `when`, unless cancelled before.
  virtual TimerId PostAt(TimePoint when, Task task) = 0;
  /// No effect if the timer ran already or never was.
  virtual void CancelTimer(TimerId timer) = 0;
  /// Whether the caller is on this executor's thread.
  virtual bool RunningHere() const = 0;
  virtual TimePoint Now() const = 0;

  TimerId PostAfter(Nanos delay, Task task) { return PostAt(Now() + delay, std::move(task)); }
};

/// An Executor with a thread of its own, named for `ps` and gdb. The destructor stops and joins it.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(std::string name);
  ~ThreadExecutor() override;
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  void Post(Task task) override;
  TimerId PostAt(TimePoint when, Task task) override;
  void CancelTimer(TimerId timer) override;
  bool RunningHere() const override;
  TimePoint Now() const override;

  /// Drops what is queued, lets the running task end, joins. Idempotent; not from the executor's
  /// thread.
  void Stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorbus
