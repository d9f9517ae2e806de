#include "tensorbus/cli/plan_run.h"

#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <map>
#include <optional>
#include <ostream>

#include "planner/templates.h"
#include "planner/topology.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/cost_file.h"
#include "tensorbus/cli/plan_report.h"
#include "tensorbus/cli/topology_file.h"
#include "tensorbus/formats/layout_book_file.h"
#include "tensorbus/formats/layout_file.h"
#include "tensorbus/formats/manifest_file.h"

namespace tensorbus::cli {
namespace {

using std::chrono::steady_clock;

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

Status Usage(std::string message) {
  return {Code::kInvalidArgument, std::move(message), Reason::kMalformed};
}

int ExitCodeFor(const Status& status) {
  switch (status.code()) {
    case Code::kFailedPrecondition:
    case Code::kResourceExhausted:
    case Code::kInternal:
    case Code::kUnavailable:
      return kExitFailed;
    default:
      return kExitUsage;
  }
}

Status CheckOptions(const PlanOptions& o) {
  if (o.relays != "off" && o.relays != "on" && o.relays != "auto")
    return Usage(fmt::format("--relays '{}': off, on or auto is needed", o.relays));
  const bool files = !o.source.empty() || !o.target.empty();
  const bool book = !o.layouts.empty() || !o.scenario.empty();
  if (files == book)
    return Usage("either --source and --target or --layouts and --scenario are needed");
  if (files && (o.source.empty() || o.target.empty()))
    return Usage("--source and --target belong together");
  if (book && (o.layouts.empty() || o.scenario.empty()))
    return Usage("--layouts and --scenario belong together");
  if (o.scenario == "all" && (!o.ops.empty() || !o.explain.empty()))
    return Usage("--ops and --explain are for one scenario, not for 'all'");
  return {};
}

/// Ids that share the most with `wanted`, for an error message.
std::string NearIds(const LayoutBook& book, const std::string& wanted) {
  std::size_t best = 0;
  std::vector<std::string> near;
  for (const Scenario& scenario : book.scenarios) {
    std::size_t common = 0;
    while (common < std::min(wanted.size(), scenario.id.size()) &&
           wanted[common] == scenario.id[common]) {
      ++common;
    }
    if (common > best) near.clear();
    best = std::max(best, common);
    if (common == best) near.push_back(scenario.id);
  }
  return fmt::format("{}", fmt::join(near, ", "));
}

Result<std::vector<const Scenario*>> ChooseScenarios(const LayoutBook& book,
                                                     const std::string& wanted) {
  std::vector<const Scenario*> chosen;
  for (const Scenario& scenario : book.scenarios) {
    if (scenario.id == wanted) return std::vector<const Scenario*>{&scenario};
    const bool prefix = scenario.id.compare(0, wanted.size(), wanted) == 0;
    if (wanted == "all" || prefix) chosen.push_back(&scenario);
  }
  if (wanted == "all" || chosen.size() == 1) return chosen;
  if (chosen.empty()) {
    return Status(Code::kNotFound,
                  fmt::format("no scenario '{}'; near: {}", wanted, NearIds(book, wanted)));
  }
  return Usage(fmt::format("scenario '{}' is ambiguous: {}", wanted, NearIds(book, wanted)));
}

/// Plans what the options ask, one report after the other.
class Planner {
 public:
  Planner(const PlanOptions& options, std::ostream& err) : options_(options), err_(err) {}

  Status Run() {
    TB_RETURN_IF_ERROR(CheckOptions(options_));
    if (!options_.topology.empty()) {
      TB_ASSIGN_OR_RETURN(topology_, ReadTopology(options_.topology));
    }
    if (!options_.costs.empty()) {
      TB_ASSIGN_OR_RETURN(costs_, ReadCosts(options_.costs));
    }
    if (options_.scenario.empty()) return RunFiles();
    TB_ASSIGN_OR_RETURN(const LayoutBook book, formats::ReadLayoutBook(options_.layouts));
    TB_ASSIGN_OR_RETURN(const auto chosen, ChooseScenarios(book, options_.scenario));
    for (const Scenario* scenario : chosen) {
      const Status status = RunScenario(book, *scenario);
      if (!status.ok()) return status.Annotate(fmt::format("scenario {}", scenario->id));
    }
    return {};
  }

  const std::vector<OrderedJson>& reports() const { return reports_; }
  const planner::PlanFault& fault() const { return fault_; }

 private:
  Status RunFiles() {
    PlanReport report;
    TB_ASSIGN_OR_RETURN(report.source, formats::ReadLayoutFile(options_.source));
    TB_ASSIGN_OR_RETURN(report.target, formats::ReadLayoutFile(options_.target));
    return Plan(&report, false);
  }

  Status RunScenario(const LayoutBook& book, const Scenario& scenario) {
    PlanReport report;
    report.scenario = scenario.id;
    const Manifest* manifest = nullptr;
    TB_ASSIGN_OR_RETURN(manifest, ManifestOf(scenario.manifest));
    const auto side = [&](const TemplateUse& use, const char* name) -> Result<JobLayout> {
      auto layout = planner::ResolveTemplate(book, use, *manifest);
      if (!layout.ok()) return layout.status().Annotate(name);
      const Status status = Validate(*layout);
      if (!status.ok()) return status.Annotate(name);
      return layout;
    };
    TB_ASSIGN_OR_RETURN(report.source, side(scenario.source, "source"));
    TB_ASSIGN_OR_RETURN(report.target, side(scenario.target, "target"));
    return Plan(&report, scenario.colocated);
  }

  Result<const Manifest*> ManifestOf(const std::string& name) {
    if (name.find('/') != std::string::npos)
      return Usage(fmt::format("manifest '{}': a plain name is needed", name));
    if (manifest_name_ != name) {
      const std::size_t slash = options_.layouts.rfind('/');
      const std::string folder =
          slash == std::string::npos ? "" : options_.layouts.substr(0, slash + 1);
      TB_ASSIGN_OR_RETURN(manifest_, formats::ReadManifest(folder + name + ".json.gz"));
      manifest_name_ = name;
    }
    return &manifest_;
  }

  Status Plan(PlanReport* report, bool colocated) {
    report->topology = topology_ ? *topology_
                                 : planner::DefaultTopology(report->source.rank_count,
                                                            report->target.rank_count, colocated);
    TB_RETURN_IF_ERROR(PlanAndCheck(options_.relays == "on", report));
    if (options_.relays == "auto") TB_RETURN_IF_ERROR(WeighRelays(report));
    if (!options_.ops.empty()) TB_RETURN_IF_ERROR(WriteOps(*report, options_.ops));
    OrderedJson json = ToJson(*report);
    if (!costs_.empty()) json["windows"] = WindowsToJson(*report, costs_);
    if (!options_.explain.empty()) TB_RETURN_IF_ERROR(Explain(*report, &json));
    reports_.push_back(std::move(json));
    return {};
  }

  Status PlanAndCheck(bool relays, PlanReport* report) {
    auto start = steady_clock::now();
    TB_ASSIGN_OR_RETURN(report->plan,
                        planner::BuildPlan(report->source, report->target, report->topology,
                                           &fault_, {.relays = relays}));
    report->plan_seconds = SecondsSince(start);
    start = steady_clock::now();
    auto certificate =
        planner::CheckPlan(report->source, report->target, report->topology, report->plan);
    report->certificate_seconds = SecondsSince(start);
    if (!certificate.ok()) return certificate.status().Annotate("the plan fails its certificate");
    report->certificate = *certificate;
    TB_ASSIGN_OR_RETURN(report->figures, planner::FiguresOf(report->source, report->target,
                                                            report->topology, report->plan));
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
    const auto& tensors = report.target.tensors;
    const auto found = std::find_if(
        tensors.begin(), tensors.end(),
        [&](const JobLayout::Tensor& tensor) { return tensor.spec.name == options_.explain; });
    if (found == tensors.end()) {
      return Usage(
          fmt::format("--explain: the target has no tensor of the name '{}'", options_.explain));
    }
    (*json)["explain"] = ExplainToJson(report, static_cast<std::uint32_t>(found - tensors.begin()));
    PrintExplanation((*json)["explain"], err_);
    return {};
  }

  const PlanOptions& options_;
  std::ostream& err_;
  std::optional<planner::Topology> topology_;
  std::vector<planner::TransportCost> costs_;
  std::string manifest_name_;
  Manifest manifest_;
  planner::PlanFault fault_;
  std::vector<OrderedJson> reports_;
};

}  // namespace

int RunPlan(const PlanOptions& options, std::ostream& out, std::ostream& err) {
  Planner planner(options, err);
  const Status status = planner.Run();
  if (!status.ok()) {
    err << "tensorbusctl plan: " << status.message() << "\n";
    if (options.json) out << Dump(ErrorToJson(status, planner.fault())) << "\n";
    return ExitCodeFor(status);
  }
  PrintTable(planner.reports(), err);
  if (options.json) {
    const bool all = options.scenario == "all";
    out << Dump(all ? OrderedJson{{"results", planner.reports()}} : planner.reports().front())
        << "\n";
  }
  return kExitFine;
}

}  // namespace tensorbus::cli
