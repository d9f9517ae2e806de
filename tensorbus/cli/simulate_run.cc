#include "tensorbus/cli/simulate_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fmt/format.h>
#include <optional>
#include <ostream>

#include "planner/near_names.h"
#include "tensorbus/base/malformed.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/html.h"
#include "tensorbus/cli/plan_report.h"
#include "tensorbus/cli/plan_run.h"
#include "tensorbus/cli/share_folder.h"
#include "tensorbus/cli/simulate_report.h"
#include "tensorbus/formats/cluster_file.h"

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

/// A file, or the name of a cluster that is shipped.
Result<simulate::Cluster> LoadCluster(const std::string& name) {
  constexpr std::string_view kSuffix = ".json";
  std::error_code error;
  if (name.find('/') != std::string::npos || fs::is_regular_file(name, error))
    return formats::ReadCluster(name);
  TB_ASSIGN_OR_RETURN(const std::string folder, FindClusters());
  const std::string path = fmt::format("{}/{}{}", folder, name, kSuffix);
  if (fs::exists(path, error)) return formats::ReadCluster(path);
  std::vector<std::string> known;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() == kSuffix) known.push_back(at->path().stem().string());
  }
  std::sort(known.begin(), known.end());
  planner::NearNames near(name);
  for (const std::string& other : known) near.Consider(other);
  return Status(Code::kNotFound,
                fmt::format("no cluster '{}'{}; a file is needed, or one of {}", name,
                            planner::NearNames::Hint(near.Take()), fmt::join(known, ", ")));
}

template <typename Value, std::size_t kCount>
Result<Value> Choose(const char* flag, const std::string& said,
                     const std::array<std::pair<const char*, Value>, kCount>& known) {
  std::vector<std::string> names;
  for (const auto& [name, value] : known) {
    if (said == name) return value;
    names.emplace_back(name);
  }
  return Malformed(fmt::format("{} '{}': one of {} is needed", flag, said, fmt::join(names, ", ")));
}

class Simulator {
 public:
  explicit Simulator(const SimulateOptions& options) : options_(options) {}

  Status Run() {
    TB_ASSIGN_OR_RETURN(
        sharing_, Choose("--sharing", options_.sharing,
                         std::array{std::pair{"remaining", simulate::Sharing::kRemaining},
                                    std::pair{"equal", simulate::Sharing::kEqual},
                                    std::pair{"rounds", simulate::Sharing::kRounds}}));
    TB_ASSIGN_OR_RETURN(wire_,
                        Choose("--wire", options_.wire,
                               std::array{std::pair{"as-is", simulate::WireForm::kAsIs},
                                          std::pair{"fp8-block", simulate::WireForm::kFp8Block}}));
    TB_ASSIGN_OR_RETURN(relays_.relays, Choose("--relays", options_.relays,
                                               std::array{std::pair{"off", false},
                                                          std::pair{"on", true}}));
    TB_ASSIGN_OR_RETURN(cluster_, LoadCluster(options_.cluster));
    return ForEachTransfer(options_.transfer, [this](Transfer transfer) {
      // A cluster that is too small for one of all scenarios is no reason not to see the others.
      const Status status = Simulate(std::move(transfer));
      if (options_.transfer.scenario != "all" || status.reason() != Reason::kLayoutMismatch)
        return status;
      skipped_.push_back(status.message());
      return Status();
    });
  }

  const std::vector<OrderedJson>& reports() const { return reports_; }
  const std::vector<std::string>& skipped() const { return skipped_; }
  const planner::PlanFault& fault() const { return fault_; }

 private:
  Status Simulate(Transfer transfer) {
    SimulateReport report;
    TB_ASSIGN_OR_RETURN(const simulate::Seating seating,
                        simulate::SeatRanks(cluster_, transfer.source.rank_count,
                                            transfer.target.rank_count, transfer.colocated));
    const planner::Topology topology =
        transfer.topology ? *transfer.topology : simulate::TopologyOf(cluster_, seating);
    std::vector<bool> quantised = simulate::QuantisedTensors(transfer.target, wire_);
    transfer.source = simulate::OnWire(std::move(transfer.source), wire_);
    transfer.target = simulate::OnWire(std::move(transfer.target), wire_);
    auto start = steady_clock::now();
    TB_ASSIGN_OR_RETURN(const planner::Plan plan,
                        planner::BuildPlan(transfer.source, transfer.target, topology, &fault_, relays_));
    report.plan_seconds = SecondsSince(start);
    TB_ASSIGN_OR_RETURN(report.figures, planner::FiguresOf(transfer.source, transfer.target,
                                                           topology, plan));
    simulate::Move move = {plan, transfer.target, report.figures, std::move(quantised)};
    if (!relays_.relays) {
      TB_ASSIGN_OR_RETURN(move.far_bytes, FarBytes(transfer, seating));
    }
    start = steady_clock::now();
    simulate::PredictOptions predict;
    predict.sharing = sharing_;
    TB_ASSIGN_OR_RETURN(report.prediction, simulate::Predict(cluster_, seating, move, predict));
    report.simulate_seconds = SecondsSince(start);
    report.transfer = std::move(transfer);
    report.cluster = cluster_.name;
    report.wire = options_.wire;
    report.sharing = options_.sharing;
    report.relays = options_.relays;
    reports_.push_back(ToJson(report));
    return {};
  }

  /// What the busiest rank must move between domains, where some bytes need not.
  Result<std::optional<std::uint64_t>> FarBytes(const Transfer& transfer,
                                                const simulate::Seating& seating) {
    const planner::Topology domains = simulate::DomainsAsDevices(cluster_, seating);
    std::optional<std::uint64_t> bytes;
    if (domains.same_device.empty()) return bytes;
    TB_ASSIGN_OR_RETURN(const planner::Plan plan,
                        planner::BuildPlan(transfer.source, transfer.target, domains, &fault_));
    TB_ASSIGN_OR_RETURN(const planner::PlanFigures figures,
                        planner::FiguresOf(transfer.source, transfer.target, domains, plan));
    bytes = figures.lower_bound_bytes;
    return bytes;
  }

  const SimulateOptions& options_;
  simulate::Cluster cluster_;
  simulate::Sharing sharing_ = simulate::Sharing::kRemaining;
  simulate::WireForm wire_ = simulate::WireForm::kAsIs;
  planner::PlanOptions relays_;
  planner::PlanFault fault_;
  std::vector<OrderedJson> reports_;
  std::vector<std::string> skipped_;
};

}  // namespace

int RunSimulate(const SimulateOptions& options, std::ostream& out, std::ostream& err) {
  Simulator simulator(options);
  Status status = simulator.Run();
  if (status.ok() && !options.html.empty())
    status = WriteFile(SimulatePage(simulator.reports()), options.html);
  if (!status.ok()) {
    err << "tensorbusctl simulate: " << status.message() << "\n";
    if (options.json) out << Dump(ErrorToJson(status, simulator.fault())) << "\n";
    return ExitCodeFor(status);
  }
  PrintPredictions(simulator.reports(), err);
  for (const std::string& why : simulator.skipped()) err << "left out: " << why << "\n";
  if (options.json) {
    const bool all = options.transfer.scenario == "all";
    out << Dump(all ? OrderedJson{{"results", simulator.reports()}, {"left_out", simulator.skipped()}}
                    : simulator.reports().front())
        << "\n";
  }
  return kExitFine;
}

}  // namespace tensorbus::cli
