#include "tensorbus/transport/exposure.h"

#include "tensorbus/base/log.h"
#include "tensorbus/transport/route_check.h"

namespace tensorbus::transport {
namespace {

constexpr Nanos kTooLong = std::chrono::seconds(10);

}  // namespace

bool AccessGate::Enter() {
  const MutexLock lock(mutex_);
  if (closed_) return false;
  ++inside_;
  return true;
}

void AccessGate::Leave() {
  const MutexLock lock(mutex_);
  if (--inside_ == 0 && closed_) idle_.NotifyAll();
}

void AccessGate::CloseAndWait() {
  const TimePoint begin = std::chrono::steady_clock::now();
  for (int waits = 1;; ++waits) {
    const std::uint64_t readers = CloseAndWaitUntil(begin + waits * kTooLong);
    if (readers == 0) return;
    Log(LogLevel::kError, "memory_still_read",
        {{"readers", readers}, {"seconds", Seconds(waits * kTooLong)}});
  }
}

std::uint64_t AccessGate::CloseAndWaitUntil(TimePoint deadline) {
  const MutexLock lock(mutex_);
  closed_ = true;
  while (inside_ != 0 && idle_.WaitUntil(mutex_, deadline)) {
  }
  return inside_;
}

Exposure::Exposure(RouteEnd source)
    : end(std::move(source)), shape(ShapeOf(end)), map(end.blocks) {}

Status ExposureTable::Add(const RouteKey& key, RouteEnd source) {
  TB_RETURN_IF_ERROR(CheckEnd(source).Annotate(RouteName(key)));
  if (source.capability.none()) {
    return {Code::kInvalidArgument, RouteName(key) + ": exposed without a capability"};
  }
  auto exposure = std::make_shared<Exposure>(std::move(source));
  const MutexLock lock(mutex_);
  if (!exposures_.try_emplace(key, std::move(exposure)).second) {
    return {Code::kAlreadyExists, RouteName(key) + " is exposed already"};
  }
  return {};
}

std::shared_ptr<Exposure> ExposureTable::Find(const RouteKey& key) const {
  const MutexLock lock(mutex_);
  const auto found = exposures_.find(key);
  return found == exposures_.end() ? nullptr : found->second;
}

Result<std::shared_ptr<Exposure>> ExposureTable::Open(const RouteKey& key,
                                                      const Capability& shown) const {
  std::shared_ptr<Exposure> found = Find(key);
  if (found == nullptr) return NotExposed(key);
  if (!shown.Opens(found->end.capability)) return NotAllowed(key);
  return found;
}

void ExposureTable::Remove(const RouteKey& key) {
  std::shared_ptr<Exposure> exposure;
  {
    const MutexLock lock(mutex_);
    const auto found = exposures_.find(key);
    if (found == exposures_.end()) return;
    exposure = std::move(found->second);
    exposures_.erase(found);
  }
  exposure->gate.CloseAndWait();
}

Status NotExposed(const RouteKey& key) {
  return {Code::kNotFound, RouteName(key) + " is not exposed there"};
}

Status NotAllowed(const RouteKey& key) {
  return {Code::kPermissionDenied,
          RouteName(key) +
              ": whoever pulls it has not shown the session's capability, which only "
              "the agents named in its Prepare are told; make sure that both ends are "
              "attached to the same tensorbusd"};
}

Status WithdrawnMeanwhile(const RouteKey& key) {
  return {Code::kNotFound, RouteName(key) + " was withdrawn while it was pulled"};
}

}  // namespace tensorbus::transport
