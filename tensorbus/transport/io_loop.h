#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/mutex.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"

namespace tensorbus::transport {

/// Something that wants to know when its descriptor is ready. Confined to its loop's thread.
class IoHandler {
 public:
  virtual ~IoHandler() = default;
  /// `events` as epoll gives them. Level-triggered: what is left over comes again.
  virtual void OnReady(std::uint32_t events) = 0;
};

/// One thread around epoll: descriptors, timers and posted tasks. Post() is thread-safe, everything
/// else is for the loop's own thread. Owns a scratch buffer that its handlers use in turn, never
/// across two calls.
class IoLoop {
 public:
  using Task = std::function<void()>;
  using TimerId = std::uint64_t;

  static Result<std::unique_ptr<IoLoop>> Create(const std::string& name, std::size_t scratch_bytes);
  ~IoLoop();
  IoLoop(const IoLoop&) = delete;
  IoLoop& operator=(const IoLoop&) = delete;

  void Post(Task task);
  /// Runs what is posted, lets go of all handlers, joins. Idempotent; not from the loop's thread.
  void Stop();

  /// Keeps `handler` alive until Unwatch().
  Status Watch(int fd, std::uint32_t events, std::shared_ptr<IoHandler> handler);
  void Rewatch(int fd, std::uint32_t events);
  /// No call of the handler follows. Call before the descriptor is closed.
  void Unwatch(int fd);

  TimerId RunAt(TimePoint when, Task task);
  void CancelTimer(TimerId timer);

  std::span<std::byte> scratch() { return scratch_; }

 private:
  IoLoop(UniqueFd epoll, UniqueFd wake, std::size_t scratch_bytes);
  void Run();
  void RunTimers();
  /// False once stopped and nothing is posted any more.
  bool RunTasks();
  int MillisToNextTimer() const;

  const UniqueFd epoll_;
  const UniqueFd wake_;
  std::vector<std::byte> scratch_;
  std::unordered_map<int, std::shared_ptr<IoHandler>> handlers_;
  std::map<std::pair<TimePoint, TimerId>, Task> timers_;
  std::unordered_map<TimerId, TimePoint> timer_times_;
  TimerId next_timer_ = 1;

  Mutex mutex_;
  std::vector<Task> tasks_ TB_GUARDED_BY(mutex_);
  bool stopping_ TB_GUARDED_BY(mutex_) = false;
  std::jthread thread_;
};

}  // namespace tensorbus::transport
