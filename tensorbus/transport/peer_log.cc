#include "tensorbus/transport/peer_log.h"

#include <utility>

#include "tensorbus/base/log.h"

namespace tensorbus::transport {

void PeerLog::Write(std::string_view event, const Status& why) {
  const std::optional<std::uint64_t> held_back = Admit(Clock::Real().Now());
  if (!held_back.has_value()) return;
  Log(LogLevel::kWarn, event, {{"error", why}, {"held_back", *held_back}});
}

std::optional<std::uint64_t> PeerLog::Admit(TimePoint now) {
  const MutexLock lock(mutex_);
  if (now >= period_end_) {
    period_end_ = now + kPeriod;
    lines_ = 0;
  }
  if (lines_ == kLinesMax) {
    ++held_back_;
    return std::nullopt;
  }
  ++lines_;
  return std::exchange(held_back_, 0);
}

}  // namespace tensorbus::transport
