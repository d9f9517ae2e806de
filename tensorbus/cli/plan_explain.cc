#include "tensorbus/cli/plan_explain.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <map>

#include "tensorbus/base/printable.h"
#include "tensorbus/cli/table.h"

namespace tensorbus::cli {
namespace {

constexpr std::size_t kAlone = std::numeric_limits<std::size_t>::max();

/// Knows for one tensor who holds what and who sits together.
class Reasons {
 public:
  Reasons(const PlanReport& report, std::uint32_t tensor) : report_(report) {
    const JobLayout& source = report.transfer.source;
    const std::string& name = report.transfer.target.tensors[tensor].spec.name;
    const auto held = std::find_if(
        source.tensors.begin(), source.tensors.end(),
        [&](const JobLayout::Tensor& candidate) { return candidate.spec.name == name; });
    holding_ = &source.HoldingOf(*held);  // the plan exists, so the source has it
    for (std::size_t n = 0; n < report.topology.nodes.size(); ++n) {
      for (const std::uint32_t s : report.topology.nodes[n].source) source_node_[s] = n;
      for (const std::uint32_t t : report.topology.nodes[n].target) target_node_[t] = n;
    }
  }

  /// Source ranks with a box around this one.
  const std::vector<std::uint32_t>& HoldersOf(const Box& box) {
    const auto [at, fresh] = holders_.emplace(box, std::vector<std::uint32_t>());
    if (!fresh) return at->second;
    for (const RankBoxes& held : holding_->ranks) {
      if (std::any_of(held.boxes.begin(), held.boxes.end(),
                      [&](const Box& mine) { return mine.Contains(box); })) {
        at->second.push_back(held.rank);
      }
    }
    return at->second;
  }

  std::string Why(const CopyOp& op) {
    if (op.local) return "already on its device";
    if (op.relayed) return WhyRelayed(op);
    const std::vector<std::uint32_t>& holders = HoldersOf(op.box);
    if (holders.size() == 1) return "the only holder";
    const std::size_t node = NodeOf(target_node_, op.target);
    const auto near = std::count_if(holders.begin(), holders.end(), [&](std::uint32_t rank) {
      return node != kAlone && NodeOf(source_node_, rank) == node;
    });
    if (near == 1) return fmt::format("the only one of {} holders on its node", holders.size());
    if (near > 1) {
      return fmt::format("one of {} holders on its node ({} in all), by load: it sends {}", near,
                         holders.size(), Load(op.source));
    }
    return fmt::format("one of {} holders, by load: it sends {}", holders.size(), Load(op.source));
  }

 private:
  std::string WhyRelayed(const CopyOp& op) const {
    const std::size_t node = NodeOf(target_node_, op.target);
    if (node != kAlone && NodeOf(target_node_, op.source) == node)
      return "passes it on inside the node, where it has arrived once";
    return "passes it on, so that it leaves the source once";
  }
  std::string Load(std::uint32_t source) const {
    return HumanBytes(report_.figures.send_bytes[source]);
  }
  static std::size_t NodeOf(const std::map<std::uint32_t, std::size_t>& nodes, std::uint32_t rank) {
    const auto found = nodes.find(rank);
    return found == nodes.end() ? kAlone : found->second;
  }

  const PlanReport& report_;
  const Holding* holding_ = nullptr;
  std::map<std::uint32_t, std::size_t> source_node_;
  std::map<std::uint32_t, std::size_t> target_node_;
  std::map<Box, std::vector<std::uint32_t>> holders_;
};

}  // namespace

OrderedJson ExplainToJson(const PlanReport& report, std::uint32_t tensor) {
  const TensorSpec& spec = report.transfer.target.tensors[tensor].spec;
  Reasons reasons(report, tensor);
  OrderedJson json;
  json["tensor"] = spec.name;
  json["dtype"] = DTypeName(spec.dtype);
  json["shape"] = spec.shape.dims();
  OrderedJson ops = OrderedJson::array();
  for (const planner::Route& route : report.plan.routes) {
    for (const CopyOp& op : planner::OpsOf(report.plan, route)) {
      if (op.tensor != tensor) continue;
      ops.push_back({{"target", op.target},
                     {op.relayed ? "relay_from" : "source", op.source},
                     {"local", op.local},
                     {"schedule_round", op.local ? OrderedJson() : OrderedJson(route.round)},
                     {"bytes", op.box.volume() * ItemBytes(spec.dtype)},
                     {"box", BoxToJson(op.box)},
                     {"holders", reasons.HoldersOf(op.box)},
                     {"why", reasons.Why(op)}});
    }
  }
  json["ops"] = std::move(ops);
  return json;
}

void PrintExplanation(const OrderedJson& explanation, std::ostream& out) {
  out << fmt::format("tensor '{}' {} {}\n", Printable(explanation["tensor"].get<std::string>()),
                     explanation["dtype"].get<std::string>(), explanation["shape"].dump());
  for (const OrderedJson& op : explanation["ops"]) {
    const bool relayed = op.contains("relay_from");
    out << fmt::format("  target {:>4} <- {} {:>4}  {:>11}  {:<10} {}  {}\n",
                       op["target"].get<std::uint32_t>(), relayed ? "target" : "source",
                       op[relayed ? "relay_from" : "source"].get<std::uint32_t>(),
                       HumanBytes(op["bytes"].get<std::uint64_t>()),
                       op["local"].get<bool>()
                           ? "local"
                           : fmt::format("round {}", op["schedule_round"].get<std::uint32_t>()),
                       op["box"].dump(), op["why"].get<std::string>());
  }
}

}  // namespace tensorbus::cli
