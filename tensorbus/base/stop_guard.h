#pragma once

#include <string>
#include <string_view>
#include <thread>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"

namespace tensorbus {

/// The deadline of everything that a process waits for while it stops.
///
/// Threads that do not end cannot be left behind: they would use what is destroyed next. If the
/// guard is alive after `limit`, it writes which step did not end to the log and ends the process
/// with status 1, running nothing more of it.
///
/// Threads: At() on the thread that stops.
class StopGuard {
 public:
  /// `who` is for the log: "agent".
  StopGuard(std::string who, Nanos limit);
  /// All ended in time.
  ~StopGuard();
  StopGuard(const StopGuard&) = delete;
  StopGuard& operator=(const StopGuard&) = delete;

  /// What is waited for from now on: "copies".
  void At(std::string_view step);

 private:
  void Run(TimePoint deadline);

  const std::string who_;
  Mutex mutex_;
  CondVar ended_;
  std::string step_ TB_GUARDED_BY(mutex_);
  bool over_ TB_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tensorbus
