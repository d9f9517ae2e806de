#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tensorbus::cli {

/// Order statistics of a handful of measurements. Zeros for none.
struct Spread {
  double min = 0;
  double median = 0;
  double p95 = 0;  ///< nearest rank
  double max = 0;
};

Spread SpreadOf(std::vector<double> values);
double MedianOf(std::vector<double> values);

/// What a figure was measured on.
struct HostInfo {
  std::string cpu_model;
  std::uint32_t cores = 0;  ///< that this process may use
  std::uint64_t ram_bytes = 0;
  std::uint64_t ram_available_bytes = 0;
  std::string kernel;
  double load = 0;  ///< runnable processes, mean of the last minute, before the run
};

HostInfo DescribeHost();

}  // namespace tensorbus::cli
