#include "tensorbus/cli/plan_html.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <map>

#include "tensorbus/cli/html.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

constexpr int kWidth = 1040;
constexpr int kLeft = 70;
constexpr int kTop = 30;
/// A drawing holds at most so many rows and columns; more ranks are put together.
constexpr std::uint32_t kMaxCells = 128;

/// Puts so many consecutive ranks into one row or column that they fit.
std::uint32_t GroupOf(std::uint32_t ranks) {
  return (ranks + kMaxCells - 1) / kMaxCells;
}

std::string Ranks(const char* what, std::uint32_t first, std::uint32_t group, std::uint32_t count) {
  const std::uint32_t last = std::min(count, first + group) - 1;
  return first == last ? fmt::format("{} {}", what, first)
                       : fmt::format("{} {} to {}", what, first, last);
}

/// Bytes as the depth of a colour; what is relayed has a colour of its own.
class Matrix {
 public:
  Matrix(const PlanReport& report, bool relayed)
      : columns_(report.transfer.target.rank_count),
        rows_(relayed ? report.transfer.target.rank_count : report.transfer.source.rank_count),
        relayed_(relayed) {
    for (const planner::Route& route : report.plan.routes) {
      if (route.relayed != relayed) continue;
      const auto key = std::pair(route.source / GroupOf(rows_), route.target / GroupOf(columns_));
      Cell& cell = cells_[key];
      (route.local ? cell.local : cell.sent) += route.bytes;
      most_ = std::max(most_, cell.sent + cell.local);
    }
  }

  bool empty() const { return cells_.empty(); }

  std::string Svg() const {
    const std::uint32_t across = (columns_ + GroupOf(columns_) - 1) / GroupOf(columns_);
    const std::uint32_t down = (rows_ + GroupOf(rows_) - 1) / GroupOf(rows_);
    const double size =
        std::min({34.0, static_cast<double>(kWidth - kLeft) / across, 900.0 / down});
    // Few ranks leave room for the number; otherwise it is in the tip of the cell.
    const double room = std::min(96.0, static_cast<double>(kWidth - kLeft) / across);
    const bool numbers = room >= 84 && size >= 18;
    const double wide = numbers ? room : size;
    std::string svg = fmt::format(
        R"~(<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="Bytes from each rank to each )~"
        R"~(target">)~",
        kWidth, kTop + size * down + 10);
    const char* row = relayed_ ? "target" : "source";
    svg += fmt::format(R"~(<text class="soft" x="0" y="{}">{}</text>)~"
                       R"~(<text class="soft" x="{}" y="12">to target</text>)~",
                       kTop + 12, row, kLeft);
    const std::uint32_t step_x = Every(wide, 26);
    const std::uint32_t step_y = Every(size, 12);
    for (std::uint32_t x = 0; x < across; x += step_x) {
      svg += fmt::format(R"~(<text class="soft" x="{:.1f}" y="26" text-anchor="middle">{}</text>)~",
                         kLeft + wide * (x + 0.5), x * GroupOf(columns_));
    }
    for (std::uint32_t y = 0; y < down; y += step_y) {
      svg += fmt::format(R"~(<text class="soft" x="{}" y="{:.1f}" text-anchor="end">{}</text>)~",
                         kLeft - 8, kTop + size * (y + 0.5) + 4, y * GroupOf(rows_));
    }
    for (const auto& [key, cell] : cells_) {
      const double depth =
          0.12 + 0.88 * static_cast<double>(cell.sent + cell.local) / static_cast<double>(most_);
      const char* paint = cell.sent == 0 ? "var(--good)" : relayed_ ? "#d9822b" : "var(--ours)";
      svg += fmt::format(
          R"~(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}" )~"
          R"~(fill-opacity="{:.2f}"><title>{} → {}: {}{}</title></rect>)~",
          kLeft + wide * key.second, kTop + size * key.first, wide - 0.5, size - 0.5, paint, depth,
          Ranks(row, key.first * GroupOf(rows_), GroupOf(rows_), rows_),
          Ranks("target", key.second * GroupOf(columns_), GroupOf(columns_), columns_),
          HumanBytes(cell.sent), cell.local == 0 ? "" : ", local " + HumanBytes(cell.local));
      if (!numbers) continue;
      svg += fmt::format(R"~(<text x="{:.1f}" y="{:.1f}" text-anchor="middle"{}>{}</text>)~",
                         kLeft + wide * (key.second + 0.5), kTop + size * (key.first + 0.5) + 4,
                         depth > 0.5 ? R"~( style="font-size:12px;fill:var(--page)")~"
                                     : R"~( style="font-size:12px")~",
                         HumanBytes(cell.sent + cell.local));
    }
    return svg + "</svg>" +
           fmt::format(
               R"~(<p class="legend">The deeper the colour, the more bytes: here up to {}.</p>)~",
               HumanBytes(most_));
  }

 private:
  struct Cell {
    std::uint64_t sent = 0;
    std::uint64_t local = 0;
  };

  /// Labels no closer than `room` pixels.
  static std::uint32_t Every(double size, double room) {
    return std::max<std::uint32_t>(1, static_cast<std::uint32_t>(room / size + 0.999));
  }

  std::uint32_t columns_;
  std::uint32_t rows_;
  bool relayed_;
  std::uint64_t most_ = 1;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Cell> cells_;
};

/// A row a target, a bar a route: the rounds one after the other, each as long as its largest
/// route.
std::string Rounds(const PlanReport& report) {
  const auto& routes = report.plan.routes;
  const std::uint32_t targets = report.transfer.target.rank_count;
  const std::uint32_t shown = std::min(targets, kMaxCells);
  std::vector<std::uint64_t> longest(report.plan.round_count);
  for (const planner::Route& route : routes) {
    if (!route.local) longest[route.round] = std::max(longest[route.round], route.bytes);
  }
  std::vector<double> starts = {0};
  for (const std::uint64_t bytes : longest)
    starts.push_back(starts.back() + static_cast<double>(bytes));
  const double scale = starts.back() > 0 ? (kWidth - kLeft - 10) / starts.back() : 0;
  const double height = std::clamp(700.0 / std::max(1U, shown), 3.0, 18.0);
  std::string svg = fmt::format(
      R"~(<svg viewBox="0 0 {} {:.0f}" role="img" aria-label="What each target receives in )~"
      R"~(which round">)~",
      kWidth, kTop + height * shown + 10);
  svg += fmt::format(
      R"~(<text class="soft" x="0" y="{}">target</text>)~"
      R"~(<text class="soft" x="{}" y="12">rounds, each as wide as its largest route</text>)~",
      kTop + 12, kLeft);
  double last_label = -100;
  for (std::size_t r = 0; r < longest.size(); ++r) {
    const double x = kLeft + starts[r] * scale;
    if (x - last_label < 24) continue;
    last_label = x;
    svg += fmt::format(
        R"~(<text class="soft" x="{0:.1f}" y="26">{1}</text>)~"
        R"~(<line x1="{0:.1f}" x2="{0:.1f}" y1="{2}" y2="{3:.0f}" stroke="var(--line)"/>)~",
        x, r, kTop, kTop + height * shown);
  }
  const auto step = static_cast<std::uint32_t>(12 / height + 0.999);
  for (std::uint32_t t = 0; t < shown; t += std::max(1U, step)) {
    svg += fmt::format(R"~(<text class="soft" x="{}" y="{:.1f}" text-anchor="end">{}</text>)~",
                       kLeft - 8, kTop + height * (t + 0.5) + 4, t);
  }
  for (const planner::Route& route : routes) {
    if (route.local || route.target >= shown) continue;
    svg += fmt::format(R"~(<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" fill="{}">)~"
                       R"~(<title>round {}: {} {} → target {}: {}</title></rect>)~",
                       kLeft + starts[route.round] * scale, kTop + height * route.target + 0.5,
                       std::max(0.3, static_cast<double>(route.bytes) * scale - 0.4), height - 1,
                       route.relayed ? "#d9822b" : "var(--ours)", route.round,
                       route.relayed ? "target" : "source", route.source, route.target,
                       HumanBytes(route.bytes));
  }
  return svg + "</svg>";
}

}  // namespace

std::string PlanPage(const PlanReport& report, const OrderedJson& json) {
  const planner::PlanFigures& figures = report.figures;
  std::string html = PageHead("Tensorbus plan", "Plan: " + LabelOf(json));
  html += fmt::format(
      R"~(<p class="sub">{} to {} ranks, {} tensors in {} classes; digest {}.</p>)~",
      report.transfer.source.rank_count, report.transfer.target.rank_count,
      report.transfer.target.tensors.size(), figures.class_count, report.plan.digest.ToHex());
  html += R"~(<div class="facts">)~";
  html += Fact(HumanBytes(figures.unique_bytes), "needed by at least one target");
  html += Fact(HumanBytes(json["max_recv_bytes"].get<std::uint64_t>()),
               "received by the busiest target");
  html += Fact(HumanBytes(json["max_send_bytes"].get<std::uint64_t>()), "sent by the busiest rank");
  html += Fact(HumanBytes(figures.lower_bound_bytes), "no plan of this kind has less");
  html += Fact(fmt::format("{} / {}", figures.route_count, figures.round_count), "routes / rounds");
  html += Fact(HumanBytes(report.certificate.bytes), "proven, every byte once");
  html += R"~(</div><p class="legend"><i style="background:var(--ours)"></i>first hand)~"
          R"~(<i style="background:#d9822b"></i>passed on<i style="background:var(--good)">)~"
          R"~(</i>on the device already</p>)~";
  html += "<h2>Who sends how much to whom</h2>";
  html += Matrix(report, false).Svg();
  const Matrix relayed(report, true);
  if (!relayed.empty()) html += "<h2>What targets pass on</h2>" + relayed.Svg();
  html += "<h2>Rounds</h2>";
  if (report.transfer.target.rank_count > kMaxCells)
    html += fmt::format(R"~(<p class="sub">The first {} targets.</p>)~", kMaxCells);
  return html + Rounds(report) + PageTail();
}

}  // namespace tensorbus::cli
