#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <optional>

#include "agent/worker_desk.h"

namespace tensorbus::agent {

/// How long a worker that asked to wait `timeout_ms` waits at most.
Nanos TimeoutOf(std::uint64_t timeout_ms);
/// At least 1: on the wire 0 is no deadline at all.
std::uint64_t MillisecondsUntil(TimePoint deadline, TimePoint now);

template <typename Message>
std::optional<Message> WorkerDesk::Parse(Worker& worker, const wire::Frame& frame) {
  Result<Message> message = wire::Decode<Message>(frame.body);
  if (message.ok()) return *std::move(message);
  BreakOff(worker,
           message.status().Annotate(fmt::format("message type {}", static_cast<int>(frame.type))));
  return std::nullopt;
}

}  // namespace tensorbus::agent
