#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "tensorbus/cli/html.h"
#include "tensorbus/cli/simulate_report.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

constexpr int kChartWidth = 1040;
constexpr int kChartLeft = 60;
constexpr int kChartRight = 20;
constexpr int kChartTop = 10;
constexpr int kChartHeight = 220;
constexpr std::array<const char*, 7> kColours = {"#2f6db5", "#d9822b", "#1d7a46", "#8a5fbf",
                                                 "#b3261e", "#5d8f94", "#8d99a6"};

/// The share of each kind of link in use, over time: a line of steps a kind.
std::string UtilisationChart(const OrderedJson& report) {
  const double total = report["predicted_seconds"].get<double>();
  const int bottom = kChartTop + kChartHeight;
  const int plot = kChartWidth - kChartLeft - kChartRight;
  std::string svg = fmt::format(
      R"~(<svg viewBox="0 0 {} {}" role="img" aria-label="Share of the links in use over time">)~",
      kChartWidth, bottom + 44);
  for (int tick = 0; tick <= 4; ++tick) {
    const int y = bottom - kChartHeight * tick / 4;
    const int x = kChartLeft + plot * tick / 4;
    svg += fmt::format(R"~(<line x1="{0}" x2="{1}" y1="{2}" y2="{2}" stroke="var(--line)"/>)~"
                       R"~(<text class="soft" x="{3}" y="{4}" text-anchor="end">{5} %</text>)~",
                       kChartLeft, kChartWidth - kChartRight, y, kChartLeft - 8, y + 4, 25 * tick);
    svg += fmt::format(R"~(<text class="soft" x="{}" y="{}" text-anchor="{}">{}</text>)~", x,
                       bottom + 18,
                       tick == 4   ? "end"
                       : tick == 0 ? "start"
                                   : "middle",
                       SecondsText(total * tick / 4));
  }
  std::size_t colour = 0;
  int legend = kChartLeft;
  for (const OrderedJson& kind : report["links"]) {
    const OrderedJson& shares = kind["utilisation"];
    std::string points;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      const double y = bottom - kChartHeight * std::min(1.0, shares[i].get<double>());
      const auto x = [&](std::size_t at) {
        return kChartLeft + static_cast<double>(plot) * static_cast<double>(at) /
                                static_cast<double>(shares.size());
      };
      points += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", x(i), y, x(i + 1), y);
    }
    const char* paint = kColours[colour++ % kColours.size()];
    svg += fmt::format(R"~(<polyline points="{}" fill="none" stroke="{}" stroke-width="2"/>)~",
                       points, paint);
    const std::string name = kind["kind"].get<std::string>();
    svg += fmt::format(R"~(<rect x="{}" y="{}" width="10" height="10" rx="2" fill="{}"/>)~"
                       R"~(<text class="soft" x="{}" y="{}">{}</text>)~",
                       legend, bottom + 30, paint, legend + 15, bottom + 39, Escape(name));
    legend += 35 + 7 * static_cast<int>(name.size());
  }
  return svg + "</svg>";
}

std::string LinksTable(const OrderedJson& report) {
  std::string html =
      R"~(<div class="scroll"><table><thead><tr><th>Links</th><th>in use</th><th>bytes</th>)~"
      R"~(<th>busiest</th>)~"
      R"~(<th>busy for</th><th>of the whole time</th></tr></thead><tbody>)~";
  for (const OrderedJson& kind : report["links"]) {
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1f} %</td></tr>",
        Escape(kind["kind"].get<std::string>()), kind["links"].get<std::uint64_t>(),
        HumanBytes(kind["bytes"].get<std::uint64_t>()), Escape(kind["busiest"].get<std::string>()),
        SecondsText(kind["busiest_seconds"].get<double>()),
        100 * kind["busiest_utilisation"].get<double>());
  }
  return html + "</tbody></table></div>";
}

std::string PathTable(const OrderedJson& report) {
  std::string html =
      R"~(<div class="scroll"><table><thead><tr><th>The last byte comes this way</th><th>bytes)~"
      R"~(</th><th>from</th>)~"
      R"~(<th>to</th><th>held by</th></tr></thead><tbody>)~";
  for (const OrderedJson& step : report["critical_path"]) {
    html += fmt::format(
        "<tr><td>{} to {}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
        Escape(step["from"].get<std::string>()), Escape(step["to"].get<std::string>()),
        HumanBytes(step["bytes"].get<std::uint64_t>()),
        SecondsText(step["start_seconds"].get<double>()),
        SecondsText(step["end_seconds"].get<double>()), Escape(step["held_by"].get<std::string>()));
  }
  return html + "</tbody></table></div>";
}

std::string PredictionSection(const OrderedJson& report) {
  std::string html = fmt::format(
      R"~(<h2>{}</h2><p class="sub">{} to {} ranks on cluster {}; wire {}, sharing {}, relays )~"
      R"~({}. <b>A prediction</b> from line rates and message costs; nothing was measured.)~"
      R"~(</p>)~",
      Escape(LabelOf(report)), report["source_ranks"].get<std::uint64_t>(),
      report["target_ranks"].get<std::uint64_t>(), Escape(report["cluster"].get<std::string>()),
      Escape(report["wire"].get<std::string>()), Escape(report["sharing"].get<std::string>()),
      Escape(report["relays"].get<std::string>()));
  html += R"~(<div class="facts">)~";
  html +=
      Fact(SecondsText(report["predicted_seconds"].get<double>()), "predicted, to the last byte");
  html += Fact(SecondsText(report["bound_seconds"].get<double>()), "no plan of this kind is below");
  html += Fact(fmt::format("{:.3f}", report["ratio"].get<double>()), "times that bound");
  html +=
      Fact(HumanBytes(report["wire_bytes"].get<std::uint64_t>()), "travel, relayed bytes again");
  html += Fact(report["busiest_link"].get<std::string>(), "busiest link");
  html += "</div>";
  for (const OrderedJson& bound : report["bounds"]) {
    html += fmt::format(R"~(<p class="legend">Not below {}: {}.</p>)~",
                        SecondsText(bound["seconds"].get<double>()),
                        Escape(bound["why"].get<std::string>()));
  }
  return html + UtilisationChart(report) + LinksTable(report) + PathTable(report);
}

}  // namespace

std::string SimulatePage(const std::vector<OrderedJson>& reports) {
  std::string html = PageHead("Tensorbus prediction", "Predicted weight refresh");
  for (const OrderedJson& report : reports) html += PredictionSection(report);
  return html + PageTail();
}

}  // namespace tensorbus::cli
