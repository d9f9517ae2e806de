#pragma once

#include <string>
#include <string_view>

#include "simulate/cluster.h"

namespace tensorbus::formats {

/// Reads a cluster (`tensorbus-cluster-1`, described in docs/planner.md); it is valid. Errors:
/// kInvalidArgument naming the field; as ReadText().
Result<simulate::Cluster> ParseCluster(std::string_view text);
Result<simulate::Cluster> ReadCluster(const std::string& path);

}  // namespace tensorbus::formats
