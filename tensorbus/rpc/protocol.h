#pragma once

#include <chrono>
#include <cstdint>

#include "tensorbus/base/clock.h"

namespace tensorbus::rpc {

/// What agent and daemon speak over gRPC. Peers of another number are refused; it grows with any
/// change that an older peer would misread.
inline constexpr std::uint32_t kControlProtocol = 3;

/// How often an agent says that it lives.
inline constexpr Nanos kHeartbeat = std::chrono::seconds(1);
/// In which an agent says something, if it lives, before another may take its name.
inline constexpr int kBeatsToKeepAName = 3;
/// How long an agent waits for its Welcome. One that must wait for a name has to be told who holds
/// it before it gives up.
inline constexpr Nanos kWelcomeTimeout = std::chrono::seconds(5);
static_assert(kHeartbeat * kBeatsToKeepAName < kWelcomeTimeout);

}  // namespace tensorbus::rpc
