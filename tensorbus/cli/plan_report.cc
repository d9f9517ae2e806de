#include "tensorbus/cli/plan_report.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <iterator>
#include <optional>

#include "tensorbus/base/printable.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

void AppendOp(const std::string& name, const CopyOp& op, std::optional<std::uint32_t> round,
              std::string* text) {
  fmt::format_to(std::back_inserter(*text), "{{\"tensor\": {}, \"{}\": {}, \"target\": {}, ", name,
                 op.relayed ? "relay_from" : "source", op.source, op.target);
  if (round) fmt::format_to(std::back_inserter(*text), "\"round\": {}, ", *round);
  *text += "\"box\": [";
  for (int d = 0; d < op.box.rank(); ++d) {
    fmt::format_to(std::back_inserter(*text), "{}[{}, {}]", d == 0 ? "" : ", ", op.box[d].lo,
                   op.box[d].hi);
  }
  *text += "]}\n";
}

std::uint64_t MaxOf(const std::vector<std::uint64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

void PutNames(const Transfer& transfer, OrderedJson* json) {
  if (!transfer.scenario.empty()) (*json)["scenario"] = transfer.scenario;
  if (transfer.model.empty()) return;
  (*json)["model"] = transfer.model;
  (*json)["from"] = transfer.from;
  (*json)["to"] = transfer.to;
}

std::string LabelOf(const OrderedJson& report) {
  if (report.contains("scenario")) return report["scenario"].get<std::string>();
  return report.value("model", "(files)");
}

OrderedJson BoxToJson(const Box& box) {
  OrderedJson json = OrderedJson::array();
  for (const Range& range : box.ranges()) json.push_back({range.lo, range.hi});
  return json;
}

OrderedJson ToJson(const PlanReport& report) {
  const planner::PlanFigures& f = report.figures;
  OrderedJson json;
  const Transfer& transfer = report.transfer;
  PutNames(transfer, &json);
  json["relays"] = report.plan.options.relays ? "on" : "off";
  if (!report.why.empty()) json["relays_why"] = report.why;
  json["source_ranks"] = transfer.source.rank_count;
  json["target_ranks"] = transfer.target.rank_count;
  json["tensors"] = transfer.target.tensors.size();
  json["classes"] = f.class_count;
  json["routes"] = f.route_count;
  json["ops"] = f.op_count;
  json["rounds"] = f.round_count;
  json["schedule_bytes"] = f.schedule_bytes;
  json["unique_bytes"] = f.unique_bytes;
  json["recv_bytes"] = f.recv_bytes;
  json["local_bytes"] = f.local_bytes;
  json["send_bytes"] = f.send_bytes;
  json["relay_bytes"] = f.relay_bytes;
  json["node_in_bytes"] = f.node_in_bytes;
  json["max_send_bytes"] = f.max_send_bytes;
  json["max_port_bytes"] = f.max_port_bytes;
  json["max_recv_bytes"] = MaxOf(f.recv_bytes);
  json["lower_bound_bytes"] = f.lower_bound_bytes;
  json["plan_seconds"] = report.plan_seconds;
  json["certificate"] = {{"valid", true},
                         {"bytes", report.certificate.bytes},
                         {"ops", report.certificate.op_count},
                         {"seconds", report.certificate_seconds}};
  json["digest"] = report.plan.digest.ToHex();
  return json;
}

OrderedJson ErrorToJson(const Status& status, const planner::PlanFault& fault) {
  OrderedJson error;
  error["code"] = CodeName(status.code());
  error["reason"] = ReasonName(status.reason());
  error["message"] = status.message();
  error["tensor"] = fault.tensor.empty() ? OrderedJson() : OrderedJson(fault.tensor);
  error["rank"] = fault.rank ? OrderedJson(*fault.rank) : OrderedJson();
  error["box"] = fault.box ? BoxToJson(*fault.box) : OrderedJson();
  if (fault.near_names.empty()) {
    error["candidates"] = fault.near_ranks;
  } else {
    error["candidates"] = fault.near_names;
  }
  return {{"error", std::move(error)}};
}

OrderedJson WindowsToJson(const PlanReport& report,
                          const std::vector<planner::TransportCost>& costs) {
  const std::vector<planner::RouteShape> shapes =
      planner::ShapesOf(report.transfer.source, report.transfer.target, report.plan);
  OrderedJson json = OrderedJson::object();
  for (const planner::TransportCost& cost : costs) {
    std::array<std::uint64_t, planner::kWindowKindCount> routes = {};
    std::array<std::uint64_t, planner::kWindowKindCount> bytes = {};
    for (std::size_t r = 0; r < shapes.size(); ++r) {
      if (report.plan.routes[r].local) continue;
      const auto kind = static_cast<std::size_t>(planner::ChooseWindow(cost, shapes[r]));
      ++routes[kind];
      bytes[kind] += shapes[r].bytes;
    }
    for (int kind = 0; kind < planner::kWindowKindCount; ++kind) {
      const auto k = static_cast<std::size_t>(kind);
      json[cost.name][planner::WindowKindName(static_cast<planner::WindowKind>(kind))] = {
          {"routes", routes[k]}, {"bytes", bytes[k]}};
    }
  }
  return json;
}

void PrintTable(const std::vector<OrderedJson>& reports, std::ostream& out) {
  const auto number = [](const OrderedJson& json, const char* key) {
    return json[key].get<std::uint64_t>();
  };
  out << fmt::format("{:<44} {:>9} {:>8} {:>9} {:>7} {:>11} {:>11} {:>11} {:>7} {:>9}\n", "plan",
                     "ranks", "tensors", "ops", "rounds", "max send", "max recv", "bound", "ratio",
                     "plan ms");
  for (const OrderedJson& report : reports) {
    const std::uint64_t bound = number(report, "lower_bound_bytes");
    const std::uint64_t busiest =
        std::max(number(report, "max_send_bytes"), number(report, "max_recv_bytes"));
    const double ratio =
        bound == 0 ? 1.0 : static_cast<double>(busiest) / static_cast<double>(bound);
    out << fmt::format(
        "{:<44} {:>9} {:>8} {:>9} {:>7} {:>11} {:>11} {:>11} {:>7.3f} {:>9.1f}\n",
        Printable(LabelOf(report)),
        fmt::format("{}->{}", number(report, "source_ranks"), number(report, "target_ranks")),
        number(report, "tensors"), number(report, "ops"), number(report, "rounds"),
        HumanBytes(number(report, "max_send_bytes")), HumanBytes(number(report, "max_recv_bytes")),
        HumanBytes(bound), ratio,
        1e3 * (report["plan_seconds"].get<double>() +
               report["certificate"]["seconds"].get<double>()));
  }
  if (reports.size() != 1) return;
  const OrderedJson& report = reports.front();
  out << fmt::format("unique {}, {} routes, {} classes, certificate proves {}, digest {}\n",
                     HumanBytes(number(report, "unique_bytes")), number(report, "routes"),
                     number(report, "classes"),
                     HumanBytes(report["certificate"]["bytes"].get<std::uint64_t>()),
                     report["digest"].get<std::string>());
}

Status WriteOps(const PlanReport& report, const std::string& path) {
  TB_ASSIGN_OR_RETURN(OutputFile file, OutputFile::Create(path));
  std::vector<std::string> names;
  for (const JobLayout::Tensor& tensor : report.transfer.target.tensors)
    names.push_back(Dump(tensor.spec.name));
  constexpr std::size_t kFlushBytes = 1 << 20;
  std::string text;
  for (const planner::Route& route : report.plan.routes) {
    std::optional<std::uint32_t> round;  // without relays no op depends on another's
    if (report.plan.options.relays && !route.local) round = route.round;
    for (const CopyOp& op : planner::OpsOf(report.plan, route)) {
      AppendOp(names[op.tensor], op, round, &text);
      if (text.size() < kFlushBytes) continue;
      TB_RETURN_IF_ERROR(file.Write(text));
      text.clear();
    }
  }
  TB_RETURN_IF_ERROR(file.Write(text));
  return file.Finish();
}

}  // namespace tensorbus::cli
