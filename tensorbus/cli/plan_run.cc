#include "tensorbus/cli/plan_run.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <ostream>

#include "planner/near_names.h"
#include "planner/topology.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/malformed.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/cost_file.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/plan_explain.h"
#include "tensorbus/cli/plan_html.h"
#include "tensorbus/cli/plan_report.h"

namespace tensorbus::cli {
namespace {

using std::chrono::steady_clock;

Status CheckOptions(const PlanOptions& o) {
  if (o.relays != "off" && o.relays != "on" && o.relays != "auto")
    return Malformed(fmt::format("--relays '{}': off, on or auto is needed", o.relays));
  if (o.transfer.scenario == "all" && (!o.ops.empty() || !o.explain.empty() || !o.html.empty()))
    return Malformed("--ops, --explain and --html are for one scenario, not for 'all'");
  return {};
}

/// Plans what the options ask, one report after the other.
class Planner {
 public:
  Planner(const PlanOptions& options, std::ostream& err) : options_(options), err_(err) {}

  Status Run() {
    TB_RETURN_IF_ERROR(CheckOptions(options_));
    if (!options_.costs.empty()) {
      TB_ASSIGN_OR_RETURN(costs_, ReadCosts(options_.costs));
    }
    return ForEachTransfer(options_.transfer,
                           [this](Transfer transfer) { return Plan(std::move(transfer)); });
  }

  const std::vector<OrderedJson>& reports() const { return reports_; }
  const planner::PlanFault& fault() const { return fault_; }

 private:
  Status Plan(Transfer transfer) {
    PlanReport made;
    made.transfer = std::move(transfer);
    const JobLayout& source = made.transfer.source;
    const JobLayout& target = made.transfer.target;
    made.topology = made.transfer.topology
                        ? *made.transfer.topology
                        : planner::DefaultTopology(source.rank_count, target.rank_count,
                                                   made.transfer.colocated);
    TB_RETURN_IF_ERROR(PlanAndCheck(options_.relays == "on", &made));
    if (options_.relays == "auto") TB_RETURN_IF_ERROR(WeighRelays(&made));
    if (!options_.ops.empty()) TB_RETURN_IF_ERROR(WriteOps(made, options_.ops));
    OrderedJson json = ToJson(made);
    if (!costs_.empty()) json["windows"] = WindowsToJson(made, costs_);
    if (!options_.explain.empty()) TB_RETURN_IF_ERROR(Explain(made, &json));
    if (!options_.html.empty()) TB_RETURN_IF_ERROR(WriteFile(PlanPage(made, json), options_.html));
    reports_.push_back(std::move(json));
    return {};
  }

  Status PlanAndCheck(bool relays, PlanReport* report) {
    const JobLayout& source = report->transfer.source;
    const JobLayout& target = report->transfer.target;
    auto start = steady_clock::now();
    TB_ASSIGN_OR_RETURN(report->plan, planner::BuildPlan(source, target, report->topology, &fault_,
                                                         {.relays = relays}));
    report->plan_seconds = Seconds(steady_clock::now() - start);
    start = steady_clock::now();
    auto certificate = planner::CheckPlan(source, target, report->topology, report->plan);
    report->certificate_seconds = Seconds(steady_clock::now() - start);
    if (!certificate.ok()) return certificate.status().Annotate("the plan fails its certificate");
    report->certificate = *certificate;
    TB_ASSIGN_OR_RETURN(report->figures,
                        planner::FiguresOf(source, target, report->topology, report->plan));
    return {};
  }

  /// Plans with relays as well and keeps the better plan.
  Status WeighRelays(PlanReport* report) {
    PlanReport relayed = *report;
    TB_RETURN_IF_ERROR(PlanAndCheck(true, &relayed));
    planner::RelayVerdict verdict = planner::WeighRelays(report->figures, relayed.figures);
    if (verdict.relays) *report = std::move(relayed);
    report->why = std::move(verdict.why);
    return {};
  }

  Status Explain(const PlanReport& report, OrderedJson* json) {
    const auto& tensors = report.transfer.target.tensors;
    const auto found = std::find_if(
        tensors.begin(), tensors.end(),
        [&](const JobLayout::Tensor& tensor) { return tensor.spec.name == options_.explain; });
    if (found == tensors.end()) {
      planner::NearNames near(options_.explain);
      for (const JobLayout::Tensor& tensor : tensors) near.Consider(tensor.spec.name);
      return Malformed(fmt::format("--explain: the target has no tensor of the name '{}'{}",
                                   options_.explain, planner::NearNames::Hint(near.Take())));
    }
    (*json)["explain"] = ExplainToJson(report, static_cast<std::uint32_t>(found - tensors.begin()));
    PrintExplanation((*json)["explain"], err_);
    return {};
  }

  const PlanOptions& options_;
  std::ostream& err_;
  std::vector<planner::TransportCost> costs_;
  planner::PlanFault fault_;
  std::vector<OrderedJson> reports_;
};

}  // namespace

int RunPlan(const PlanOptions& options, std::ostream& out, std::ostream& err) {
  Planner planner(options, err);
  const Status status = planner.Run();
  if (!status.ok()) {
    err << "tensorbusctl plan: " << Printable(status.message()) << "\n";
    if (options.json) out << Dump(ErrorToJson(status, planner.fault())) << "\n";
    return ExitCodeFor(status);
  }
  PrintTable(planner.reports(), err);
  if (options.json) {
    const bool all = options.transfer.scenario == "all";
    out << Dump(all ? OrderedJson{{"results", planner.reports()}} : planner.reports().front())
        << "\n";
  }
  return kExitFine;
}

}  // namespace tensorbus::cli
