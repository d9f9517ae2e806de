#pragma once

#include <cstdint>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::bench {

/// Bytes that are contiguous in both a source rank's arena and the target's.
struct Run {
  std::uint32_t source = 0;
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t bytes = 0;
};

/// All that target rank `rank` needs, as runs between arenas laid out by cli::PlaceRank(), in the
/// order of the target's addresses and as long as they can be: what somebody who knows both layouts
/// would write down by hand. Errors as planner::BuildPlan().
Result<std::vector<Run>> RunsOf(const JobLayout& source, const JobLayout& target,
                                std::uint32_t rank);

}  // namespace tensorbus::bench
