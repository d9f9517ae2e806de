#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tensorbus::planner {

/// Traffic from one source rank to one target rank.
struct Traffic {
  std::uint32_t source = 0;
  std::uint32_t target = 0;
  std::uint64_t bytes = 0;
};

/// Numbers rounds so that in each every source sends to at most one target and every target
/// receives from at most one source. As few rounds as any schedule can have (the largest number of
/// partners of one rank); heavy traffic is placed first, so that rounds tend to hold like with
/// like. `traffic` names each pair at most once. Deterministic.
std::vector<std::uint32_t> AssignRounds(std::span<const Traffic> traffic);

}  // namespace tensorbus::planner
