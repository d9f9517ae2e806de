#include <algorithm>
#include <cmath>
#include <ctime>
#include <fmt/format.h>

#include "tensorbus/cli/bench_report.h"
#include "tensorbus/cli/html.h"
#include "tensorbus/cli/output_file.h"

namespace tensorbus::cli {
namespace {

struct Bar {
  std::string name;
  double value = 0;
  const char* colour = "--peer";
};

/// The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`.
double NiceCeiling(double value) {
  if (value <= 0) return 1;
  const double power = std::pow(10.0, std::floor(std::log10(value)));
  for (const double step : {1.0, 2.0, 2.5, 5.0}) {
    if (power * step >= value) return power * step;
  }
  return power * 10;
}

/// Horizontal bars from zero, each with its value at its end.
std::string BarChart(const std::vector<Bar>& bars) {
  constexpr int kWidth = 1040;
  constexpr int kLeft = 160;
  constexpr int kRight = 70;
  constexpr int kRow = 30;
  constexpr int kTop = 8;
  constexpr int kTicks = 4;
  double most = 0;
  for (const Bar& bar : bars) most = std::max(most, bar.value);
  const double ceiling = NiceCeiling(most);
  const int bottom = kTop + kRow * static_cast<int>(bars.size());
  std::string svg = fmt::format(
      R"~(<svg viewBox="0 0 {} {}" role="img" aria-label="GB/s of each way to move the weights">)~",
      kWidth, bottom + 26);
  const auto x_of = [&](double value) {
    return kLeft + (kWidth - kLeft - kRight) * value / ceiling;
  };
  for (int tick = 0; tick <= kTicks; ++tick) {
    const double value = ceiling * tick / kTicks;
    svg += fmt::format(
        R"~(<line x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}" stroke="var(--line)"/>)~"
        R"~(<text class="soft" x="{0:.1f}" y="{3}" text-anchor="middle">{4:.4g}{5}</text>)~",
        x_of(value), kTop, bottom, bottom + 18, value, tick == kTicks ? " GB/s" : "");
  }
  int y = kTop;
  for (const Bar& bar : bars) {
    svg += fmt::format(R"~(<text x="{}" y="{}" text-anchor="end">{}</text>)~"
                       R"~(<rect x="{}" y="{}" width="{:.1f}" height="{}" rx="3" fill="var({})"/>)~"
                       R"~(<text x="{:.1f}" y="{}">{:.2f}</text>)~",
                       kLeft - 10, y + 20, Escape(bar.name), kLeft, y + 5,
                       std::max(1.0, x_of(bar.value) - kLeft), kRow - 10, bar.colour,
                       x_of(bar.value) + 8, y + 20, bar.value);
    y += kRow;
  }
  return svg + "</svg>";
}

std::vector<Bar> BarsOf(const OrderedJson& result) {
  std::vector<Bar> bars = {{"tensorbus", result["gb_per_s"].get<double>(), "--ours"}};
  for (const auto& [name, peer] : result["peers"].items()) {
    if (peer["ran"].get<bool>()) bars.push_back({name, peer["gb_per_s"].get<double>(), "--peer"});
  }
  bars.push_back({"memcpy", result["memcpy_gb_per_s"].get<double>(), "--ceiling"});
  bars.push_back({"streaming copy", result["ntcopy_gb_per_s"].get<double>(), "--ceiling"});
  bars.push_back({"socket", result["socket_gb_per_s"].get<double>(), "--ceiling"});
  return bars;
}

std::string TableRow(const std::string& name, const OrderedJson& entry) {
  if (!entry.value("ran", true)) {
    return fmt::format(R"~(<tr><td>{}</td><td class="why" colspan="7">did not run: {}</td></tr>)~",
                       Escape(name), Escape(entry["why"].get<std::string>()));
  }
  const OrderedJson& seconds = entry["seconds"];
  const auto ms = [](const OrderedJson& value) { return value.get<double>() * 1e3; };
  const bool verified = entry["verified"].get<bool>();
  return fmt::format(
      R"~(<tr><td>{}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td>)~"
      R"~(<td>{:.2f}</td><td>{:.3f}</td><td class="{}">{}</td></tr>)~",
      Escape(name), ms(seconds["min"]), ms(seconds["median"]), ms(seconds["p95"]),
      ms(seconds["max"]), entry["gb_per_s"].get<double>(), entry["cpu_seconds"].get<double>(),
      verified ? "ok" : "bad", verified ? "every element" : "no");
}

std::string WorkloadSection(const OrderedJson& result) {
  const auto ms = [&result](const char* field) {
    return fmt::format("{:.2f} ms", result[field].get<double>() * 1e3);
  };
  const std::uint64_t replicas = result["replicas"].get<std::uint64_t>();
  std::string html = fmt::format(
      R"~(<h2>{}</h2><p class="sub">{} tensors, {:.1f} MB from {} to {}{} ranks; transport )~"
      R"~({}, memory {}, proof {}, flip {}; {} refreshes.{}</p>)~",
      Escape(result["workload"].get<std::string>()), result["tensors"].get<std::uint64_t>(),
      result["bytes"].get<double>() * 1e-6, result["source_ranks"].get<std::uint64_t>(),
      replicas == 1 ? "" : fmt::format("{} x ", replicas),
      result["target_ranks"].get<std::uint64_t>(), result["transport"].get<std::string>(),
      result["memory"].get<std::string>(), result["proof"].get<std::string>(),
      result["flip"].get<std::string>(), result["iterations"].get<std::uint64_t>(),
      result.value("too_noisy", false) ? " <b>Too noisy to count.</b>" : "");
  html += R"~(<div class="facts">)~";
  html += Fact(fmt::format("{:.2f} GB/s", result["gb_per_s"].get<double>()),
               "from publish to flip, median");
  html += Fact(fmt::format("{:.2f} ms", result["seconds"]["median"].get<double>() * 1e3),
               "from publish to flip, median");
  html += Fact(ms("copy_seconds"), "of it copying and checking");
  html += Fact(fmt::format("{:.2f} ms", result["trigger_ms"]["p50"].get<double>()),
               "trigger: a refresh of one small tensor");
  html += Fact(ms("source_blocked_seconds"), "until the source may write again");
  html += Fact(ms("first_seconds"), "first refresh");
  html += R"~(</div><p class="legend"><i style="background:var(--ours)"></i>Tensorbus)~"
          R"~(<i style="background:var(--peer)"></i>other ways, same bytes)~"
          R"~(<i style="background:var(--ceiling)"></i>what the machine can do</p>)~";
  html += BarChart(BarsOf(result));
  html += R"~(<div class="scroll"><table><thead><tr><th></th><th>min ms</th><th>median ms</th>)~"
          R"~(<th>p95 ms</th><th>max ms</th><th>GB/s</th><th>CPU s</th><th>verified</th></tr>)~"
          R"~(</thead><tbody>)~";
  html += TableRow("tensorbus", result);
  for (const auto& [name, peer] : result["peers"].items()) html += TableRow(name, peer);
  return html + "</tbody></table></div>";
}

}  // namespace

std::string BenchPage(const std::vector<OrderedJson>& results) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  ::localtime_r(&now, &local);
  char date[32] = {};
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M", &local);
  std::string html = PageHead("Tensorbus benchmark", "Weight refresh, M to N");
  if (!results.empty()) {
    const OrderedJson& host = results.front()["host"];
    html += fmt::format(
        "<p class=\"sub\">{}; {}, {} cores, {:.0f} GB of memory, Linux {}, load {:.1f} before the "
        "run. Everything ran alternating, in one go, on this machine.</p>",
        date, Escape(host["cpu_model"].get<std::string>()), host["cores"].get<std::uint64_t>(),
        host["ram_bytes"].get<double>() * 1e-9, Escape(host["kernel"].get<std::string>()),
        host["load"].get<double>());
  }
  for (const OrderedJson& result : results) html += WorkloadSection(result);
  return html + PageTail();
}

Status WriteBenchPage(const std::vector<OrderedJson>& results, const std::string& path) {
  return WriteFile(BenchPage(results), path);
}

}  // namespace tensorbus::cli
