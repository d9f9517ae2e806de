#include "tensorbus/base/executor.h"

#include <deque>
#include <map>
#include <pthread.h>
#include <thread>
#include <unordered_map>
#include <utility>

#include "tensorbus/base/check.h"
#include "tensorbus/base/mutex.h"

namespace tensorbus {

namespace {

class RealClock final : public Clock {
 public:
  TimePoint Now() override { return std::chrono::steady_clock::now(); }
};

}  // namespace

Clock& Clock::Real() {
  static RealClock clock;
  return clock;
}

struct ThreadExecutor::State {
  Mutex mutex;
  CondVar wake;
  std::deque<Task> ready TB_GUARDED_BY(mutex);
  std::multimap<TimePoint, std::pair<TimerId, Task>> timed TB_GUARDED_BY(mutex);
  std::unordered_map<TimerId, TimePoint> due TB_GUARDED_BY(mutex);
  TimerId next_timer TB_GUARDED_BY(mutex) = 1;
  bool stopping TB_GUARDED_BY(mutex) = false;
  std::thread thread;
  std::thread::id thread_id;

  /// The next task to run, or none when stopping. Waits for either.
  bool Next(Task* out) {
    MutexLock lock(mutex);
    for (;;) {
      if (stopping) return false;
      if (!timed.empty() && timed.begin()->first <= std::chrono::steady_clock::now()) {
        due.erase(timed.begin()->second.first);
        *out = std::move(timed.begin()->second.second);
        timed.erase(timed.begin());
        return true;
      }
      if (!ready.empty()) {
        *out = std::move(ready.front());
        ready.pop_front();
        return true;
      }
      if (timed.empty()) {
        wake.Wait(mutex);
      } else {
        wake.WaitUntil(mutex, timed.begin()->first);
      }
    }
  }
};

ThreadExecutor::ThreadExecutor(std::string name) : state_(std::make_unique<State>()) {
  State* state = state_.get();
  state->thread = std::thread([state, name = std::move(name)] {
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    for (Task task; state->Next(&task); task = nullptr) task();
  });
  state->thread_id = state->thread.get_id();
}

ThreadExecutor::~ThreadExecutor() {
  Stop();
}

void ThreadExecutor::Post(Task task) {
  MutexLock lock(state_->mutex);
  if (state_->stopping) return;
  state_->ready.push_back(std::move(task));
  state_->wake.NotifyOne();
}

Executor::TimerId ThreadExecutor::PostAt(TimePoint when, Task task) {
  MutexLock lock(state_->mutex);
  const TimerId id = state_->next_timer++;
  if (state_->stopping) return id;
  state_->due.emplace(id, when);
  state_->timed.emplace(when, std::pair(id, std::move(task)));
  state_->wake.NotifyOne();
  return id;
}

void ThreadExecutor::CancelTimer(TimerId timer) {
  Task dropped;  // destroyed after the lock is gone: it may own something that posts
  MutexLock lock(state_->mutex);
  const auto found = state_->due.find(timer);
  if (found == state_->due.end()) return;
  const auto [begin, end] = state_->timed.equal_range(found->second);
  for (auto it = begin; it != end; ++it) {
    if (it->second.first != timer) continue;
    dropped = std::move(it->second.second);
    state_->timed.erase(it);
    break;
  }
  state_->due.erase(found);
}

bool ThreadExecutor::RunningHere() const {
  return std::this_thread::get_id() == state_->thread_id;
}

TimePoint ThreadExecutor::Now() const {
  return std::chrono::steady_clock::now();
}

void ThreadExecutor::Stop() {
  TB_CHECK(!RunningHere());
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    state_->wake.NotifyOne();
  }
  if (state_->thread.joinable()) state_->thread.join();
  // Destroyed after the lock is gone, as in CancelTimer().
  std::deque<Task> ready;
  std::multimap<TimePoint, std::pair<TimerId, Task>> timed;
  MutexLock lock(state_->mutex);
  ready.swap(state_->ready);
  timed.swap(state_->timed);
  state_->due.clear();
}

}  // namespace tensorbus
