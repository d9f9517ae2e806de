#include "tensorbus/transport/io_loop.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace tensorbus::transport {

Result<std::unique_ptr<IoLoop>> IoLoop::Create(const std::string& name, std::size_t scratch_bytes) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoStatus(errno, "epoll_create1");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoStatus(errno, "eventfd");
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = wake.get();
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  std::unique_ptr<IoLoop> loop(new IoLoop(std::move(epoll), std::move(wake), scratch_bytes));
  loop->thread_ = std::jthread([raw = loop.get()] { raw->Run(); });
  pthread_setname_np(loop->thread_.native_handle(), name.substr(0, 15).c_str());
  return loop;
}

IoLoop::IoLoop(UniqueFd epoll, UniqueFd wake, std::size_t scratch_bytes)
    : epoll_(std::move(epoll)), wake_(std::move(wake)), scratch_(scratch_bytes) {}

IoLoop::~IoLoop() {
  Stop();
}

void IoLoop::Post(Task task) {
  {
    const MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  const std::uint64_t one = 1;
  // Fails only when the counter is full, and then the loop is awake anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void IoLoop::Stop() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  Post([] {});
  if (thread_.joinable()) thread_.join();
}

Status IoLoop::Watch(int fd, std::uint32_t events, std::shared_ptr<IoHandler> handler) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus(errno, "epoll_ctl");
  }
  handlers_[fd] = std::move(handler);
  return {};
}

void IoLoop::Rewatch(int fd, std::uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = fd;
  TB_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

void IoLoop::Unwatch(int fd) {
  if (handlers_.erase(fd) == 0) return;
  TB_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr) == 0);
}

IoLoop::TimerId IoLoop::RunAt(TimePoint when, Task task) {
  const TimerId id = next_timer_++;
  timers_.emplace(std::pair(when, id), std::move(task));
  timer_times_.emplace(id, when);
  return id;
}

void IoLoop::CancelTimer(TimerId timer) {
  const auto found = timer_times_.find(timer);
  if (found == timer_times_.end()) return;
  timers_.erase({found->second, timer});
  timer_times_.erase(found);
}

int IoLoop::MillisToNextTimer() const {
  if (timers_.empty()) return -1;
  const auto left = timers_.begin()->first.first - std::chrono::steady_clock::now();
  const auto millis = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::clamp<std::int64_t>(millis, 0, 60'000));
}

void IoLoop::RunTimers() {
  const TimePoint now = std::chrono::steady_clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    const Task task = std::move(timers_.begin()->second);
    timer_times_.erase(timers_.begin()->first.second);
    timers_.erase(timers_.begin());
    task();
  }
}

bool IoLoop::RunTasks() {
  std::vector<Task> tasks;
  for (bool stopping = false;; tasks.clear()) {
    {
      const MutexLock lock(mutex_);
      stopping = stopping_;
      tasks.swap(tasks_);
    }
    if (tasks.empty()) return !stopping;
    for (Task& task : tasks) {
      task();
      task = nullptr;  // what it holds goes before the next one runs
    }
    // When stopping, what these posted runs too; otherwise descriptors get their turn.
    if (!stopping) return true;
  }
}

void IoLoop::Run() {
  std::array<epoll_event, 64> events;
  while (RunTasks()) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   MillisToNextTimer());
    TB_CHECK(count >= 0 || errno == EINTR);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.fd == wake_.get()) {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &ignored, sizeof ignored);
        continue;
      }
      const auto found = handlers_.find(event.data.fd);
      if (found == handlers_.end()) continue;  // unwatched by an earlier one of this round
      const std::shared_ptr<IoHandler> handler = found->second;
      handler->OnReady(event.events);
    }
    RunTimers();
  }
  timers_.clear();
  timer_times_.clear();
  handlers_.clear();
}

}  // namespace tensorbus::transport
