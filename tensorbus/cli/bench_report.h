#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/cli/bench_bus.h"
#include "tensorbus/cli/bench_stats.h"
#include "tensorbus/cli/ordered_json.h"

namespace tensorbus::cli {

/// What came of one peer.
struct PeerResult {
  std::string name;
  bool ran = false;
  std::string why;  ///< when it did not run, or not to the end
  std::vector<double> seconds;
  std::vector<double> cpu_seconds;
  double setup_seconds = 0;
  double first_seconds = 0;
  std::uint64_t rss_bytes_peak = 0;
  bool verified = false;
};

/// What came of one workload.
struct BenchResult {
  std::string workload;
  std::uint32_t source_ranks = 0;
  std::uint32_t target_ranks = 0;
  std::uint32_t replicas = 1;
  std::uint64_t tensors = 0;
  std::uint32_t scale = 1;
  BusSettings settings;
  std::string memory_note;
  HostInfo host;
  std::uint64_t bytes = 0;
  Lap first;
  std::vector<Lap> laps;
  std::vector<double> trigger_seconds;
  double register_seconds = 0;
  double prefault_seconds = 0;
  bool verified = false;
  double memcpy_gb_per_s = 0;
  double ntcopy_gb_per_s = 0;
  double socket_gb_per_s = 0;
  std::optional<std::uint64_t> staging_bytes_peak;
  std::uint64_t rss_bytes_peak = 0;
  std::uint64_t worker_rss_bytes_peak = 0;
  std::vector<PeerResult> peers;
};

/// The fields of docs/benchmarks.md.
OrderedJson ToJson(const BenchResult& result);
OrderedJson ToJson(const HostInfo& host);

/// For people: one line for us, each ceiling and each peer, from a result's JSON.
void PrintBench(const OrderedJson& result, std::ostream& out);

/// Writes a page with a chart and all figures that needs nothing else. Error: as the system says,
/// naming the path.
Status WriteBenchPage(const std::vector<OrderedJson>& results, const std::string& path);
std::string BenchPage(const std::vector<OrderedJson>& results);

}  // namespace tensorbus::cli
