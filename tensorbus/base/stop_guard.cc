#include "tensorbus/base/stop_guard.h"

#include <cstdlib>
#include <pthread.h>
#include <utility>

#include "tensorbus/base/log.h"

namespace tensorbus {

StopGuard::StopGuard(std::string who, Nanos limit) : who_(std::move(who)) {
  thread_ = std::thread([this, deadline = std::chrono::steady_clock::now() + limit] {
    pthread_setname_np(pthread_self(), "tb-stop");
    Run(deadline);
  });
}

StopGuard::~StopGuard() {
  {
    const MutexLock lock(mutex_);
    over_ = true;
    ended_.NotifyOne();
  }
  thread_.join();
}

void StopGuard::At(std::string_view step) {
  const MutexLock lock(mutex_);
  step_ = step;
}

void StopGuard::Run(TimePoint deadline) {
  const MutexLock lock(mutex_);
  while (!over_) {
    if (ended_.WaitUntil(mutex_, deadline) || over_) continue;
    Log(LogLevel::kError, "stop_does_not_end", {{"who", who_}, {"step", step_}});
    std::_Exit(EXIT_FAILURE);
  }
}

}  // namespace tensorbus
