#include "tensorbus/cli/simulate_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fmt/format.h>
#include <ostream>

#include "planner/near_names.h"
#include "tensorbus/base/clock.h"
#include "tensorbus/base/malformed.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/plan_report.h"
#include "tensorbus/cli/share_folder.h"
#include "tensorbus/cli/simulate_report.h"
#include "tensorbus/formats/cluster_file.h"

namespace tensorbus::cli {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

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

enum class Relays { kOff, kOn, kAuto };

class Simulator {
 public:
  explicit Simulator(const SimulateOptions& options) : options_(options) {}

  Status Run() {
    TB_ASSIGN_OR_RETURN(sharing_,
                        Choose("--sharing", options_.sharing,
                               std::array{std::pair{"remaining", simulate::Sharing::kRemaining},
                                          std::pair{"equal", simulate::Sharing::kEqual},
                                          std::pair{"rounds", simulate::Sharing::kRounds}}));
    TB_ASSIGN_OR_RETURN(wire_,
                        Choose("--wire", options_.wire,
                               std::array{std::pair{"as-is", simulate::WireForm::kAsIs},
                                          std::pair{"fp8-block", simulate::WireForm::kFp8Block}}));
    TB_ASSIGN_OR_RETURN(
        relays_, Choose("--relays", options_.relays,
                        std::array{std::pair{"off", Relays::kOff}, std::pair{"on", Relays::kOn},
                                   std::pair{"auto", Relays::kAuto}}));
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
    TB_ASSIGN_OR_RETURN(const simulate::Seating seating,
                        simulate::SeatRanks(cluster_, transfer.source.rank_count,
                                            transfer.target.rank_count, transfer.colocated));
    quantised_ = simulate::QuantisedTensors(transfer.target, wire_);
    SimulateReport report;
    report.transfer = std::move(transfer);
    report.transfer.source = simulate::OnWire(std::move(report.transfer.source), wire_);
    report.transfer.target = simulate::OnWire(std::move(report.transfer.target), wire_);
    report.cluster = cluster_.name;
    report.wire = options_.wire;
    report.sharing = options_.sharing;
    TB_RETURN_IF_ERROR(Predict(seating, relays_ == Relays::kOn, &report));
    if (relays_ == Relays::kAuto) TB_RETURN_IF_ERROR(WeighRelays(seating, &report));
    reports_.push_back(ToJson(report));
    return {};
  }

  Status Predict(const simulate::Seating& seating, bool relays, SimulateReport* report) {
    const JobLayout& source = report->transfer.source;
    const JobLayout& target = report->transfer.target;
    const planner::PlanOptions plan_options = {.relays = relays};
    const planner::Topology seats = simulate::TopologyOf(cluster_, seating);
    const planner::Topology& topology =
        report->transfer.topology ? *report->transfer.topology : seats;
    auto start = steady_clock::now();
    TB_ASSIGN_OR_RETURN(const planner::Plan plan,
                        planner::BuildPlan(source, target, topology, &fault_, plan_options));
    report->plan_seconds = Seconds(steady_clock::now() - start);
    TB_ASSIGN_OR_RETURN(report->figures, planner::FiguresOf(source, target, topology, plan));
    simulate::Move move = {plan, target, report->figures, quantised_};
    TB_ASSIGN_OR_RETURN(move.far_bytes,
                        planner::LeastPortBytes(source, target, seats, plan_options));
    start = steady_clock::now();
    simulate::PredictOptions predict;
    predict.sharing = sharing_;
    TB_ASSIGN_OR_RETURN(report->prediction, simulate::Predict(cluster_, seating, move, predict));
    report->simulate_seconds = Seconds(steady_clock::now() - start);
    report->relays = relays ? "on" : "off";
    return {};
  }

  /// Predicts with relays as well and keeps that when it is clearly less.
  Status WeighRelays(const simulate::Seating& seating, SimulateReport* report) {
    constexpr double kClearly = 1.0 / 64;  // as planner::WeighRelays()
    SimulateReport relayed = *report;
    TB_RETURN_IF_ERROR(Predict(seating, true, &relayed));
    const double direct_s = report->prediction.seconds;
    const double relayed_s = relayed.prediction.seconds;
    if (relayed_s < direct_s * (1 - kClearly)) *report = std::move(relayed);
    report->why = fmt::format("predicted {:.4g} s without relays and {:.4g} s with them", direct_s,
                              relayed_s);
    return {};
  }

  const SimulateOptions& options_;
  simulate::Cluster cluster_;
  simulate::Sharing sharing_ = simulate::Sharing::kRemaining;
  simulate::WireForm wire_ = simulate::WireForm::kAsIs;
  Relays relays_ = Relays::kOff;
  std::vector<bool> quantised_;  // by tensor of the transfer at hand
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
    err << "tensorbusctl simulate: " << Printable(status.message()) << "\n";
    if (options.json) out << Dump(ErrorToJson(status, simulator.fault())) << "\n";
    return ExitCodeFor(status);
  }
  PrintPredictions(simulator.reports(), err);
  for (const std::string& why : simulator.skipped()) err << "left out: " << Printable(why) << "\n";
  if (options.json) {
    const bool all = options.transfer.scenario == "all";
    out << Dump(all ? OrderedJson{{"results", simulator.reports()},
                                  {"left_out", simulator.skipped()}}
                    : simulator.reports().front())
        << "\n";
  }
  return kExitFine;
}

}  // namespace tensorbus::cli
