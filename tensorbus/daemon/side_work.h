#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "tensorbus/base/executor.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"

namespace tensorbus::daemon {

/// What may take seconds with large layouts, done off the daemon's executor so that heartbeats,
/// sessions and other channels go on: pure functions of values that nobody changes.
///
/// Each lane does one thing at a time, in the order asked for; a plan that somebody wants explained
/// does not hold up registrations.
///
/// Threads: confined to the executor, but for the work itself. The executor's tasks refer to it: it
/// must outlive the executor's running.
class SideWork {
 public:
  enum class Lane : std::uint8_t { kRegistrations, kQuestions };
  static constexpr std::size_t kLaneCount = 2;
  /// Names work that is under way; 0 names none.
  using Ticket = std::uint64_t;

  explicit SideWork(Executor& executor) : executor_(executor) {}
  virtual ~SideWork() = default;
  SideWork(const SideWork&) = delete;
  SideWork& operator=(const SideWork&) = delete;

  /// Does `work` away from the executor and then calls `done` on it, exactly once and never inside
  /// this call: with what work returned; kDeadlineExceeded/kBusy when that was not there in time
  /// (work that has begun goes on, but nobody hears of it); kResourceExhausted/kBusy when
  /// kMaxWaiting wait already. After Cancel() `done` is not called. `what` is for the messages.
  template <typename T>
  Ticket Start(Lane lane, const std::string& what, TimePoint deadline,
               std::function<Result<T>()> work, std::function<void(Result<T>)> done) {
    auto outcome = std::make_shared<std::optional<Result<T>>>();
    return Begin(
        lane, what, deadline, [outcome, work = std::move(work)] { outcome->emplace(work()); },
        [outcome, done = std::move(done)](const Status& status) {
          if (!status.ok()) return done(status);
          done(std::move(**outcome));
        });
  }
  /// Nobody waits for it any more: it is not begun unless it has, and `done` is not called.
  void Cancel(Ticket ticket);

  /// Ends whatever waits or runs with `why`, and whatever is started from now on.
  void Close(const Status& why);

  /// Work of one lane that waits or runs.
  static constexpr std::size_t kMaxWaiting = 8192;
  std::size_t waiting(Lane lane) const { return waiting_[static_cast<std::size_t>(lane)]; }

 protected:
  /// Runs a task on the lane's thread, after those given before.
  virtual void Run(Lane lane, std::function<void()> task) = 0;

 private:
  struct Job {
    std::function<void(const Status&)> done;
    Executor::TimerId timer = 0;
    std::shared_ptr<std::atomic<bool>> wanted;
  };
  Ticket Begin(Lane lane, const std::string& what, TimePoint deadline, std::function<void()> work,
               std::function<void(const Status&)> done);
  void End(Ticket ticket, const Status& status);

  Executor& executor_;
  Ticket next_ = 1;
  std::map<Ticket, Job> jobs_;
  std::array<std::size_t, kLaneCount> waiting_ = {};
  Status closed_;
};

/// A SideWork with a thread for each lane.
class ThreadSideWork final : public SideWork {
 public:
  explicit ThreadSideWork(Executor& executor);
  /// Stop()s.
  ~ThreadSideWork() override;

  /// Drops what waits, lets running work end, joins. Idempotent. From outside the executor, and
  /// before it stops: ended work is posted to it.
  void Stop();

 protected:
  void Run(Lane lane, std::function<void()> task) override;

 private:
  struct Line {
    Mutex mutex;
    CondVar wake;
    std::deque<std::function<void()>> tasks TB_GUARDED_BY(mutex);
    bool stopping TB_GUARDED_BY(mutex) = false;
    std::thread thread;
  };
  static void Serve(Line& line);

  std::array<Line, kLaneCount> lines_;
};

}  // namespace tensorbus::daemon
