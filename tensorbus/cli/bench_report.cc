#include "tensorbus/cli/bench_report.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>

#include "tensorbus/base/printable.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

/// A peer that does worse than this share of the plain streaming copy was disturbed by something.
constexpr double kQuietShare = 0.8;

OrderedJson SpreadToJson(const Spread& spread) {
  return {{"min", spread.min}, {"median", spread.median}, {"p95", spread.p95}, {"max", spread.max}};
}

double GbPerS(std::uint64_t bytes, double seconds) {
  return seconds <= 0 ? 0 : static_cast<double>(bytes) / seconds * 1e-9;
}

template <typename Field>
std::vector<double> Column(const std::vector<Lap>& laps, const Field& field) {
  std::vector<double> values;
  std::transform(laps.begin(), laps.end(), std::back_inserter(values), field);
  return values;
}

OrderedJson PeerToJson(const PeerResult& peer, std::uint64_t bytes) {
  OrderedJson json;
  json["ran"] = peer.ran;
  if (!peer.ran) {
    json["why"] = peer.why;
    return json;
  }
  const Spread spread = SpreadOf(peer.seconds);
  json["bytes"] = bytes;
  json["seconds"] = SpreadToJson(spread);
  json["gb_per_s"] = GbPerS(bytes, spread.median);
  json["first_seconds"] = peer.first_seconds;
  json["register_seconds"] = peer.setup_seconds;
  json["verified"] = peer.verified;
  json["rss_bytes_peak"] = peer.rss_bytes_peak;
  json["cpu_seconds"] = MedianOf(peer.cpu_seconds);
  return json;
}

std::string Milliseconds(double seconds) {
  return fmt::format("{:.2f}", seconds * 1e3);
}

std::string Share(double ours, double theirs) {
  return theirs > 0 ? fmt::format("{:.2f}x", ours / theirs) : "";
}

std::vector<Cell> CeilingRow(const std::string& name, double gb_per_s, double ours,
                             const std::string& note) {
  return {name, "", "", fmt::format("{:.2f}", gb_per_s), Share(ours, gb_per_s), "ceiling: " + note};
}

/// For what was timed lap by lap: ours or a peer.
std::vector<Cell> TimedRow(const std::string& name, const OrderedJson& timed,
                           const std::string& share) {
  const bool verified = timed["verified"].get<bool>();
  return {name,
          Milliseconds(timed["seconds"]["median"].get<double>()),
          Milliseconds(timed["seconds"]["p95"].get<double>()),
          fmt::format("{:.2f}", timed["gb_per_s"].get<double>()),
          share,
          verified ? Cell("verified", Colour::kGreen) : Cell("NOT VERIFIED", Colour::kRed)};
}

Table RowsOf(const OrderedJson& result) {
  const double ours = result["gb_per_s"].get<double>();
  Table table({"", "median ms", "p95 ms", "GB/s", "we are", ""}, {1, 2, 3, 4});
  table.Add(TimedRow("tensorbus", result, ""));
  for (const auto& [name, peer] : result["peers"].items()) {
    if (peer["ran"].get<bool>()) {
      table.Add(TimedRow(name, peer, Share(ours, peer["gb_per_s"].get<double>())));
    } else {
      table.Add({name, "", "", "", "", "did not run: " + peer["why"].get<std::string>()});
    }
  }
  table.Add(CeilingRow("memcpy", result["memcpy_gb_per_s"].get<double>(), ours, "two threads"));
  table.Add(
      CeilingRow("streaming copy", result["ntcopy_gb_per_s"].get<double>(), ours, "two threads"));
  table.Add(CeilingRow("socket", result["socket_gb_per_s"].get<double>(), ours,
                       "TCP over loopback, best of 1 and 2 streams"));
  return table;
}

}  // namespace

OrderedJson ToJson(const HostInfo& host) {
  return {{"cpu_model", host.cpu_model},
          {"cores", host.cores},
          {"ram_bytes", host.ram_bytes},
          {"kernel", host.kernel},
          {"load", host.load}};
}

OrderedJson ToJson(const BenchResult& result) {
  const Spread seconds = SpreadOf(Column(result.laps, [](const Lap& lap) { return lap.seconds; }));
  const Spread trigger = SpreadOf(result.trigger_seconds);
  const auto median = [&result](const auto& field) { return MedianOf(Column(result.laps, field)); };
  OrderedJson json;
  json["workload"] = result.workload;
  json["transport"] = result.settings.transport;
  json["memory"] = result.settings.memory;
  json["proof"] = result.settings.proof;
  json["flip"] = result.settings.flip;
  json["host"] = ToJson(result.host);
  json["source_ranks"] = result.source_ranks;
  json["target_ranks"] = result.target_ranks;
  json["replicas"] = result.replicas;
  json["tensors"] = result.tensors;
  json["scale"] = result.scale;
  json["iterations"] = result.laps.size();
  json["bytes"] = result.bytes;
  json["seconds"] = SpreadToJson(seconds);
  json["gb_per_s"] = GbPerS(result.bytes, seconds.median);
  json["copy_seconds"] = median([](const Lap& lap) { return lap.copy_seconds; });
  json["receipt_seconds"] = result.settings.proof == "stream"
                                ? median([](const Lap& lap) { return lap.accept_seconds; })
                                : 0.0;
  json["session_seconds"] = median([](const Lap& lap) { return lap.session_seconds; });
  json["accept_seconds"] = median([](const Lap& lap) { return lap.accept_seconds; });
  json["trigger_ms"] = {{"p50", trigger.median * 1e3}, {"p95", trigger.p95 * 1e3}};
  json["first_seconds"] = result.first.seconds;
  json["register_seconds"] = result.register_seconds;
  json["prefault_seconds"] = result.prefault_seconds;
  json["memory_note"] = result.memory_note;
  json["verified"] = result.verified;
  json["memcpy_gb_per_s"] = result.memcpy_gb_per_s;
  json["ntcopy_gb_per_s"] = result.ntcopy_gb_per_s;
  json["socket_gb_per_s"] = result.socket_gb_per_s;
  json["staging_bytes_peak"] =
      result.staging_bytes_peak ? OrderedJson(*result.staging_bytes_peak) : OrderedJson();
  json["rss_bytes_peak"] = result.rss_bytes_peak;
  json["worker_rss_bytes_peak"] = result.worker_rss_bytes_peak;
  json["cpu_seconds"] = median([](const Lap& lap) { return lap.cpu_seconds; });
  json["source_blocked_seconds"] = median([](const Lap& lap) { return lap.blocked_seconds; });
  json["peers"] = OrderedJson::object();
  for (const PeerResult& peer : result.peers) {
    json["peers"][peer.name] = PeerToJson(peer, result.bytes);
    if (peer.name != "hand-shm" || !peer.ran || result.workload != "qwen3-0.6b") continue;
    json["too_noisy"] =
        json["peers"][peer.name]["gb_per_s"].get<double>() < kQuietShare * result.ntcopy_gb_per_s;
  }
  return json;
}

void PrintBench(const OrderedJson& result, std::ostream& out) {
  const std::uint64_t replicas = result["replicas"].get<std::uint64_t>();
  out << fmt::format(
      "{}: {} tensors, {:.1f} MB, {} -> {}{}; {}, {}, proof {}, flip {}; {} refreshes\n",
      Printable(result["workload"].get<std::string>()), result["tensors"].get<std::uint64_t>(),
      result["bytes"].get<double>() * 1e-6, result["source_ranks"].get<std::uint64_t>(),
      replicas == 1 ? "" : fmt::format("{} x ", replicas),
      result["target_ranks"].get<std::uint64_t>(), result["transport"].get<std::string>(),
      result["memory"].get<std::string>(), result["proof"].get<std::string>(),
      result["flip"].get<std::string>(), result["iterations"].get<std::uint64_t>());
  RowsOf(result).Print(out, "  ");
  out << fmt::format(
      "  copying {} ms, accepting {} ms; trigger {:.2f} ms (p95 {:.2f}); first {} ms, register {} "
      "ms, prefault {} ms; source blocked {} ms; {:.3f} CPU s a refresh\n",
      Milliseconds(result["copy_seconds"].get<double>()),
      Milliseconds(result["accept_seconds"].get<double>()),
      result["trigger_ms"]["p50"].get<double>(), result["trigger_ms"]["p95"].get<double>(),
      Milliseconds(result["first_seconds"].get<double>()),
      Milliseconds(result["register_seconds"].get<double>()),
      Milliseconds(result["prefault_seconds"].get<double>()),
      Milliseconds(result["source_blocked_seconds"].get<double>()),
      result["cpu_seconds"].get<double>());
  if (result.value("too_noisy", false)) {
    out << fmt::format(
        "  too noisy to count: hand-shm is below {:.1f} x the streaming copy; run it again on a "
        "quiet machine\n",
        kQuietShare);
  }
}

}  // namespace tensorbus::cli
