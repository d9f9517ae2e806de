#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <fmt/format.h>
#include <fstream>

#include "tensorbus/cli/bench_report.h"

namespace tensorbus::cli {
namespace {

constexpr const char* kStyle = R"~(
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6670; --line: #d8dde3; --page: #ffffff;
        --card: #f5f7f9; --ours: #2f6db5; --peer: #8d99a6; --ceiling: #c9d1d9; --good: #1d7a46;
        --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #343b44; --page: #14181d; --card: #1c2229;
          --ours: #6aa5e8; --peer: #7b8794; --ceiling: #3d4752; --good: #58c789; --bad: #ff8a80; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 40px 0 2px; }
p.sub { color: var(--soft); margin: 0 0 16px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 18px; }
.fact { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.fact b { display: block; font-size: 19px; font-variant-numeric: tabular-nums; }
.fact span { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 13px; }
svg text.soft { fill: var(--soft); font-size: 12px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin-top: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; font-size: 13px; } th:first-child, td:first-child { text-align: left; }
td.ok { color: var(--good); } td.bad { color: var(--bad); } td.why { text-align: left; white-space: normal; color: var(--soft); }
.legend { color: var(--soft); font-size: 13px; } .legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 14px; }
)~";

std::string Escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '&':
        out += "&amp;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

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
        R"~(<line x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}" stroke="var(--line)"/><text class="soft" x="{0:.1f}" y="{3}" text-anchor="middle">{4:.4g}{5}</text>)~",
        x_of(value), kTop, bottom, bottom + 18, value, tick == kTicks ? " GB/s" : "");
  }
  int y = kTop;
  for (const Bar& bar : bars) {
    svg += fmt::format(
        R"~(<text x="{}" y="{}" text-anchor="end">{}</text><rect x="{}" y="{}" width="{:.1f}" height="{}" rx="3" fill="var({})"/><text x="{:.1f}" y="{}">{:.2f}</text>)~",
        kLeft - 10, y + 20, Escape(bar.name), kLeft, y + 5, std::max(1.0, x_of(bar.value) - kLeft),
        kRow - 10, bar.colour, x_of(bar.value) + 8, y + 20, bar.value);
    y += kRow;
  }
  return svg + "</svg>";
}

std::string Fact(const std::string& value, const char* what) {
  return fmt::format(R"~(<div class="fact"><b>{}</b><span>{}</span></div>)~", Escape(value), what);
}

std::vector<Bar> BarsOf(const BenchJson& result) {
  std::vector<Bar> bars = {{"tensorbus", result["gb_per_s"].get<double>(), "--ours"}};
  for (const auto& [name, peer] : result["peers"].items()) {
    if (peer["ran"].get<bool>()) bars.push_back({name, peer["gb_per_s"].get<double>(), "--peer"});
  }
  bars.push_back({"memcpy", result["memcpy_gb_per_s"].get<double>(), "--ceiling"});
  bars.push_back({"streaming copy", result["ntcopy_gb_per_s"].get<double>(), "--ceiling"});
  bars.push_back({"socket", result["socket_gb_per_s"].get<double>(), "--ceiling"});
  return bars;
}

std::string TableRow(const std::string& name, const BenchJson& entry) {
  if (!entry.value("ran", true)) {
    return fmt::format(R"~(<tr><td>{}</td><td class="why" colspan="7">did not run: {}</td></tr>)~",
                       Escape(name), Escape(entry["why"].get<std::string>()));
  }
  const BenchJson& seconds = entry["seconds"];
  const auto ms = [](const BenchJson& value) { return value.get<double>() * 1e3; };
  const bool verified = entry["verified"].get<bool>();
  return fmt::format(
      R"~(<tr><td>{}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td><td>{:.3f}</td><td class="{}">{}</td></tr>)~",
      Escape(name), ms(seconds["min"]), ms(seconds["median"]), ms(seconds["p95"]),
      ms(seconds["max"]), entry["gb_per_s"].get<double>(), entry["cpu_seconds"].get<double>(),
      verified ? "ok" : "bad", verified ? "every element" : "no");
}

std::string Section(const BenchJson& result) {
  const auto ms = [&result](const char* field) {
    return fmt::format("{:.2f} ms", result[field].get<double>() * 1e3);
  };
  const std::uint64_t replicas = result["replicas"].get<std::uint64_t>();
  std::string html = fmt::format(
      R"~(<h2>{}</h2><p class="sub">{} tensors, {:.1f} MB from {} to {}{} ranks; transport {}, memory {}, proof {}, flip {}; {} refreshes.{}</p>)~",
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
  html +=
      R"~(<div class="scroll"><table><thead><tr><th></th><th>min ms</th><th>median ms</th>)~"
      R"~(<th>p95 ms</th><th>max ms</th><th>GB/s</th><th>CPU s</th><th>verified</th></tr></thead><tbody>)~";
  html += TableRow("tensorbus", result);
  for (const auto& [name, peer] : result["peers"].items()) html += TableRow(name, peer);
  return html + "</tbody></table></div>";
}

}  // namespace

std::string BenchPage(const std::vector<BenchJson>& results) {
  const std::time_t now = std::time(nullptr);
  std::tm local = {};
  ::localtime_r(&now, &local);
  char date[32] = {};
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M", &local);
  std::string html = fmt::format(
      "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>Tensorbus benchmark</title><style>{}</style></head>"
      "<body><main><h1>Weight refresh, M to N</h1>",
      kStyle);
  if (!results.empty()) {
    const BenchJson& host = results.front()["host"];
    html += fmt::format(
        "<p class=\"sub\">{}; {}, {} cores, {:.0f} GB of memory, Linux {}, load {:.1f} before the "
        "run. Everything ran alternating, in one go, on this machine.</p>",
        date, Escape(host["cpu_model"].get<std::string>()), host["cores"].get<std::uint64_t>(),
        host["ram_bytes"].get<double>() * 1e-9, Escape(host["kernel"].get<std::string>()),
        host["load"].get<double>());
  }
  for (const BenchJson& result : results) html += Section(result);
  return html + "</main></body></html>\n";
}

Status WriteBenchPage(const std::vector<BenchJson>& results, const std::string& path) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << BenchPage(results);
  file.flush();
  if (!file) return ErrnoStatus(errno != 0 ? errno : EIO, path);
  return {};
}

}  // namespace tensorbus::cli
