#pragma once

#include <fmt/format.h>
#include <optional>

#include "agent/worker_desk.h"

namespace tensorbus::agent {

template <typename Message>
std::optional<Message> WorkerDesk::Parse(Worker& worker, const wire::Frame& frame) {
  Result<Message> message = wire::Decode<Message>(frame.body);
  if (message.ok()) return *std::move(message);
  BreakOff(worker,
           message.status().Annotate(fmt::format("message type {}", static_cast<int>(frame.type))));
  return std::nullopt;
}

}  // namespace tensorbus::agent
