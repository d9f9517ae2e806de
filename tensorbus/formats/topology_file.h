#pragma once

#include <string>
#include <string_view>

#include "planner/plan.h"

namespace tensorbus::formats {

/// Reads a topology: `{"nodes": [{"source": [0], "target": [0, 1]}], "same_device": [[0, 1]]}`. A
/// key that is missing is an empty list. Errors: kInvalidArgument naming the field; as ReadText().
Result<planner::Topology> ParseTopology(std::string_view text);
Result<planner::Topology> ReadTopology(const std::string& path);

}  // namespace tensorbus::formats
