#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "worker_shim/framing.h"
#include "worker_shim/wire.h"

// What the parts of Client share.
namespace tensorbus::worker_shim {

inline constexpr Nanos kTimeoutMax = std::chrono::hours(24 * 365);
/// How long a waiting thread sleeps at most before it looks around; bounds poll()'s argument.
inline constexpr Nanos kPollMax = std::chrono::hours(1);

inline TimePoint Now() {
  return std::chrono::steady_clock::now();
}
inline TimePoint After(Nanos timeout) {
  return Now() + std::clamp(timeout, Nanos::zero(), kTimeoutMax);
}

inline Status Protocol(std::string message) {
  return {Code::kInternal, "the agent broke the protocol: " + std::move(message),
          Reason::kMalformed};
}

/// Reads the message that a frame should carry.
template <typename Message>
Status Answered(const wire::Frame& frame, Message& message) {
  auto decoded = wire::Decode<Message>(frame.body);
  if (!decoded.ok()) return Protocol(decoded.status().message());
  message = std::move(*decoded);
  return {};
}

}  // namespace tensorbus::worker_shim
