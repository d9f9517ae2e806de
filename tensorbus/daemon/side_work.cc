#include "tensorbus/daemon/side_work.h"

#include <fmt/format.h>
#include <pthread.h>

namespace tensorbus::daemon {

SideWork::Ticket SideWork::Begin(Lane lane, const std::string& what, TimePoint deadline,
                                 std::function<void()> work,
                                 std::function<void(const Status&)> done) {
  std::size_t& waiting = waiting_[static_cast<std::size_t>(lane)];
  Status refused = closed_;
  if (refused.ok() && waiting >= kMaxWaiting) {
    refused = Status(
        Code::kResourceExhausted,
        fmt::format("{}: {} pieces of such work wait already; try again later", what, waiting),
        Reason::kBusy);
  }
  if (!refused.ok()) {
    executor_.Post([refused, done = std::move(done)] { done(refused); });
    return 0;
  }
  ++waiting;
  const Ticket ticket = next_++;
  Job job;
  job.done = std::move(done);
  job.wanted = std::make_shared<std::atomic<bool>>(true);
  job.timer = executor_.PostAt(deadline, [this, ticket, what] {
    End(ticket,
        Status(Code::kDeadlineExceeded,
               what + " took longer than it may; the daemon is busy, try again", Reason::kBusy));
  });
  // `wanted` carries no data: work that is begun although nobody wants it any more is only wasted.
  Run(lane, [this, lane, ticket, wanted = job.wanted, work = std::move(work)]() mutable {
    if (wanted->load(std::memory_order_relaxed)) work();
    // What it holds may be large: it dies here, not on the executor.
    work = nullptr;
    executor_.Post([this, lane, ticket] {
      --waiting_[static_cast<std::size_t>(lane)];
      End(ticket, {});
    });
  });
  jobs_.emplace(ticket, std::move(job));
  return ticket;
}

void SideWork::Cancel(Ticket ticket) {
  auto node = jobs_.extract(ticket);
  if (node.empty()) return;
  node.mapped().wanted->store(false, std::memory_order_relaxed);
  executor_.CancelTimer(node.mapped().timer);
}

void SideWork::Close(const Status& why) {
  closed_ = why;
  while (!jobs_.empty()) End(jobs_.begin()->first, why);
}

void SideWork::End(Ticket ticket, const Status& status) {
  auto node = jobs_.extract(ticket);
  if (node.empty()) return;
  node.mapped().wanted->store(false, std::memory_order_relaxed);
  executor_.CancelTimer(node.mapped().timer);
  node.mapped().done(status);
}

ThreadSideWork::ThreadSideWork(Executor& executor) : SideWork(executor) {
  constexpr std::array<const char*, kLaneCount> kNames = {"tb-register", "tb-questions"};
  for (std::size_t i = 0; i < kLaneCount; ++i) {
    lines_[i].thread = std::thread([&line = lines_[i], name = kNames[i]] {
      pthread_setname_np(pthread_self(), name);
      Serve(line);
    });
  }
}

ThreadSideWork::~ThreadSideWork() {
  Stop();
}

void ThreadSideWork::Run(Lane lane, std::function<void()> task) {
  Line& line = lines_[static_cast<std::size_t>(lane)];
  MutexLock lock(line.mutex);
  if (line.stopping) return;
  line.tasks.push_back(std::move(task));
  line.wake.NotifyOne();
}

void ThreadSideWork::Stop() {
  for (Line& line : lines_) {
    MutexLock lock(line.mutex);
    line.stopping = true;
    line.tasks.clear();
    line.wake.NotifyAll();
  }
  for (Line& line : lines_) {
    if (line.thread.joinable()) line.thread.join();
  }
}

void ThreadSideWork::Serve(Line& line) {
  for (;;) {
    std::function<void()> task;
    {
      MutexLock lock(line.mutex);
      while (line.tasks.empty() && !line.stopping) line.wake.Wait(line.mutex);
      if (line.stopping) return;
      task = std::move(line.tasks.front());
      line.tasks.pop_front();
    }
    task();
  }
}

}  // namespace tensorbus::daemon
