#include "tensorbus/cli/bench_stats.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sched.h>
#include <sys/utsname.h>

namespace tensorbus::cli {
namespace {

/// The text after `key` and a colon on the first line of a /proc file that begins so.
std::string FieldOf(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const std::size_t start = line.find_first_not_of(" \t:", key.size());
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

std::uint64_t KibibytesOf(const std::string& text) {
  return std::strtoull(text.c_str(), nullptr, 10) * 1024;
}

}  // namespace

Spread SpreadOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t count = values.size();
  const auto rank = static_cast<std::size_t>(std::ceil(0.95 * static_cast<double>(count)));
  return {.min = values.front(),
          .median = (values[(count - 1) / 2] + values[count / 2]) / 2,
          .p95 = values[std::max<std::size_t>(rank, 1) - 1],
          .max = values.back()};
}

double MedianOf(std::vector<double> values) {
  return SpreadOf(std::move(values)).median;
}

HostInfo DescribeHost() {
  HostInfo host;
  host.cpu_model = FieldOf("/proc/cpuinfo", "model name");
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (::sched_getaffinity(0, sizeof cpus, &cpus) == 0) {
    host.cores = static_cast<std::uint32_t>(CPU_COUNT(&cpus));
  }
  host.ram_bytes = KibibytesOf(FieldOf("/proc/meminfo", "MemTotal"));
  host.ram_available_bytes = KibibytesOf(FieldOf("/proc/meminfo", "MemAvailable"));
  utsname names = {};
  if (::uname(&names) == 0) host.kernel = names.release;
  std::ifstream("/proc/loadavg") >> host.load;
  return host;
}

}  // namespace tensorbus::cli
