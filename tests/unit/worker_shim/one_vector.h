#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "tests/unit/worker_shim/fake_agent.h"
#include "worker_shim/client.h"

// What the clients of tests are: rank 1 of two, with one vector.
namespace tensorbus::worker_shim {

inline ConnectOptions OptionsOf(const testing::FakeAgent& agent, std::string job, Role role) {
  ConnectOptions options;
  options.identity = {.channel = "policy",
                      .job = std::move(job),
                      .role = role,
                      .replica = 0,
                      .rank = 1,
                      .rank_count = 2};
  options.agent_socket = agent.path();
  options.library = "test";
  options.timeout = std::chrono::seconds(10);
  return options;
}

/// One f32 vector of 16 elements at the beginning of the first segment.
inline wire::Register OneVector() {
  wire::Register message;
  const std::array<std::uint64_t, 1> dims = {16};
  message.registration.tensors = {{"v", DType::kF32, Shape::Create(dims).value()}};
  Piece piece;
  piece.box = Box::Whole(message.registration.tensors[0].shape);
  piece.strides = {4};
  message.registration.pieces = {piece};
  return message;
}

}  // namespace tensorbus::worker_shim
