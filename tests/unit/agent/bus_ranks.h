#pragma once

#include <array>
#include <cstdint>

#include "tensorbus/types/box.h"
#include "tensorbus/types/ids.h"

// Who the ranks of tests are, and which part of a matrix they hold.
namespace tensorbus::testing {

inline Box BoxOf(Range rows, Range columns) {
  const std::array<Range, 2> ranges = {rows, columns};
  return Box(ranges);
}

inline RankIdentity Trainer(std::uint32_t rank, std::uint32_t count) {
  return {.channel = "policy",
          .job = "trainer",
          .role = Role::kProducer,
          .replica = 0,
          .rank = rank,
          .rank_count = count};
}

inline RankIdentity Engine(std::uint32_t replica, std::uint32_t rank, std::uint32_t count) {
  return {.channel = "policy",
          .job = "engine",
          .role = Role::kConsumer,
          .replica = replica,
          .rank = rank,
          .rank_count = count};
}

}  // namespace tensorbus::testing
