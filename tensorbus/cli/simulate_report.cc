#include "tensorbus/cli/simulate_report.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "tensorbus/base/printable.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

/// Four digits are more than a prediction is good for.
double Rounded(double share) {
  return std::round(share * 1e4) / 1e4;
}

OrderedJson KindToJson(const simulate::LinkKind& kind, double seconds) {
  OrderedJson json;
  json["kind"] = kind.name;
  json["links"] = kind.count;
  json["bytes"] = static_cast<std::uint64_t>(kind.bytes);
  json["busiest"] = kind.busiest;
  json["busiest_seconds"] = kind.busiest_s;
  json["busiest_utilisation"] = seconds > 0 ? Rounded(kind.busiest_s / seconds) : 0.0;
  OrderedJson timeline = OrderedJson::array();
  for (const double share : kind.timeline) timeline.push_back(Rounded(share));
  json["utilisation"] = std::move(timeline);
  return json;
}

}  // namespace

std::string SecondsText(double seconds) {
  return seconds < 0.1 ? fmt::format("{:.2f} ms", seconds * 1e3) : fmt::format("{:.3f} s", seconds);
}

OrderedJson ToJson(const SimulateReport& report) {
  const simulate::Prediction& p = report.prediction;
  OrderedJson json;
  PutNames(report.transfer, &json);
  json["prediction"] = true;  // nothing in here was measured
  json["cluster"] = report.cluster;
  json["wire"] = report.wire;
  json["sharing"] = report.sharing;
  json["relays"] = report.relays;
  if (!report.why.empty()) json["relays_why"] = report.why;
  json["source_ranks"] = report.transfer.source.rank_count;
  json["target_ranks"] = report.transfer.target.rank_count;
  json["routes"] = report.figures.route_count;
  json["wire_bytes"] = static_cast<std::uint64_t>(p.wire_bytes);
  json["predicted_seconds"] = p.seconds;
  const simulate::Bound* holds = p.bounds.empty() ? nullptr : &p.bounds.front();
  json["bound_seconds"] = holds == nullptr ? 0.0 : holds->seconds;
  json["bound"] = holds == nullptr ? "" : holds->name;
  json["ratio"] = holds == nullptr || holds->seconds <= 0 ? 1.0 : p.seconds / holds->seconds;
  json["bounds"] = OrderedJson::array();
  for (const simulate::Bound& bound : p.bounds)
    json["bounds"].push_back(
        {{"name", bound.name}, {"seconds", bound.seconds}, {"why", bound.why}});
  json["busiest_link"] = p.busiest;
  json["busiest_link_seconds"] = p.busiest_s;
  json["critical_path"] = OrderedJson::array();
  for (const simulate::PathStep& step : p.critical_path) {
    json["critical_path"].push_back({{"from", step.from},
                                     {"to", step.to},
                                     {"start_seconds", step.start_s},
                                     {"end_seconds", step.end_s},
                                     {"bytes", static_cast<std::uint64_t>(step.bytes)},
                                     {"held_by", step.held_by}});
  }
  json["links"] = OrderedJson::array();
  for (const simulate::LinkKind& kind : p.kinds)
    json["links"].push_back(KindToJson(kind, p.seconds));
  json["plan_seconds"] = report.plan_seconds;
  json["simulate_seconds"] = report.simulate_seconds;
  return json;
}

void PrintPredictions(const std::vector<OrderedJson>& reports, std::ostream& out) {
  Table table(
      {"plan", "ranks", "cluster", "predicted", "bound", "ratio", "held by", "busiest link"});
  for (const OrderedJson& report : reports) {
    table.Add({LabelOf(report),
               fmt::format("{}->{}", report["source_ranks"].get<std::uint64_t>(),
                           report["target_ranks"].get<std::uint64_t>()),
               report["cluster"].get<std::string>(),
               SecondsText(report["predicted_seconds"].get<double>()),
               SecondsText(report["bound_seconds"].get<double>()),
               fmt::format("{:.3f}", report["ratio"].get<double>()),
               report["bound"].get<std::string>(), report["busiest_link"].get<std::string>()});
  }
  table.Print(out);
  out << "A prediction from line rates and message costs; nothing was measured.\n";
  if (reports.size() != 1) return;
  const OrderedJson& report = reports.front();
  for (const OrderedJson& bound : report["bounds"]) {
    out << fmt::format("  not below {:>10}: {}\n", SecondsText(bound["seconds"].get<double>()),
                       Printable(bound["why"].get<std::string>()));
  }
  out << "The last byte comes this way:\n";
  for (const OrderedJson& step : report["critical_path"]) {
    out << fmt::format(
        "  {} -> {}  {}  from {} to {}, held by {}\n", Printable(step["from"].get<std::string>()),
        Printable(step["to"].get<std::string>()), HumanBytes(step["bytes"].get<std::uint64_t>()),
        SecondsText(step["start_seconds"].get<double>()),
        SecondsText(step["end_seconds"].get<double>()),
        Printable(step["held_by"].get<std::string>()));
  }
}

}  // namespace tensorbus::cli
