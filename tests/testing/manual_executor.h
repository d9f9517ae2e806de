#pragma once

#include <deque>
#include <map>
#include <unordered_map>
#include <utility>

#include "tensorbus/base/executor.h"

namespace tensorbus::testing {

/// An Executor in virtual time: nothing runs until the test says so, and time moves only as told.
/// Same posts, same order of runs. Confined to the test's thread.
class ManualExecutor final : public Executor {
 public:
  void Post(Task task) override { ready_.push_back(std::move(task)); }

  TimerId PostAt(TimePoint when, Task task) override {
    const TimerId id = next_timer_++;
    due_.emplace(id, when);
    timed_.emplace(std::pair(when, id), std::move(task));
    return id;
  }

  void CancelTimer(TimerId timer) override {
    const auto found = due_.find(timer);
    if (found == due_.end()) return;
    timed_.erase({found->second, timer});
    due_.erase(found);
  }

  bool RunningHere() const override { return running_; }
  TimePoint Now() const override { return now_; }

  /// Runs what is ready, and what that posts, until nothing is left; time stands still.
  void RunReady() {
    for (;;) {
      Task task;
      if (!timed_.empty() && timed_.begin()->first.first <= now_) {
        due_.erase(timed_.begin()->first.second);
        task = std::move(timed_.begin()->second);
        timed_.erase(timed_.begin());
      } else if (!ready_.empty()) {
        task = std::move(ready_.front());
        ready_.pop_front();
      } else {
        return;
      }
      running_ = true;
      task();
      running_ = false;
    }
  }

  /// Lets `duration` pass, running every timer at its own time.
  void Advance(Nanos duration) {
    const TimePoint end = now_ + duration;
    RunReady();
    while (!timed_.empty() && timed_.begin()->first.first <= end) {
      now_ = timed_.begin()->first.first;
      RunReady();
    }
    now_ = end;
  }

  /// Advances in steps until `condition` holds; false when `limit` passed first.
  template <typename Condition>
  bool AdvanceUntil(Condition condition, Nanos limit) {
    const TimePoint end = now_ + limit;
    for (;;) {
      RunReady();
      if (condition()) return true;
      if (timed_.empty() || timed_.begin()->first.first > end) {
        now_ = end;
        return false;
      }
      now_ = timed_.begin()->first.first;
    }
  }

  std::size_t timer_count() const { return timed_.size(); }

 private:
  TimePoint now_ = TimePoint() + std::chrono::hours(1);
  TimerId next_timer_ = 1;
  bool running_ = false;
  std::deque<Task> ready_;
  std::map<std::pair<TimePoint, TimerId>, Task> timed_;
  std::unordered_map<TimerId, TimePoint> due_;
};

}  // namespace tensorbus::testing
