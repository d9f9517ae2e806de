#pragma once

#include <optional>
#include <string>

namespace tensorbus::cli {

/// A value of the metrics page of a process whose log tells the port. None when there is no page,
/// or no such metric on it.
std::optional<double> ReadMetric(const std::string& log_path, const std::string& name);

}  // namespace tensorbus::cli
