#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "planner/cost.h"

namespace tensorbus::cli {

/// Parses a file of transports' costs, as share/constants/transports.json is one. Error:
/// kInvalidArgument naming the transport and the field.
Result<std::vector<planner::TransportCost>> ParseCosts(std::string_view text);

/// Reads one. Errors name the path.
Result<std::vector<planner::TransportCost>> ReadCosts(const std::string& path);

}  // namespace tensorbus::cli
