#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "tensorbus/cli/bench_bus.h"
#include "tensorbus/cli/bench_workload.h"

namespace tensorbus::cli {

/// What `tensorbusctl bench m2n` was asked.
struct BenchOptions {
  WorkloadChoice workload;
  BusSettings bus;
  std::uint32_t iterations = 20;
  std::vector<std::string> peers;  ///< names, or "all"
  std::string fault;               ///< what to inject into the second refresh; "": nothing
  bool json = false;
  std::string html;     ///< file to write
  std::string log_dir;  ///< folder to keep the processes' logs in
};

/// Measures, verifies, reports. JSON goes to `out`, what is for people to `err`. Returns an exit
/// code.
int RunBench(const BenchOptions& options, std::ostream& out, std::ostream& err);

}  // namespace tensorbus::cli
