#include "tensorbus/cli/bench_run.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fmt/format.h>
#include <optional>
#include <ostream>
#include <unistd.h>

#include "tensorbus/base/malformed.h"
#include "tensorbus/base/printable.h"
#include "tensorbus/cli/bench_peers.h"
#include "tensorbus/cli/bench_report.h"
#include "tensorbus/cli/bench_stats.h"
#include "tensorbus/cli/bench_worker.h"
#include "tensorbus/cli/commands.h"
#include "tensorbus/cli/ordered_json.h"
#include "tensorbus/cli/output_file.h"

namespace tensorbus::cli {
namespace {

/// Refreshes of the one small tensor.
constexpr std::uint32_t kTriggerLaps = 50;
constexpr std::uint32_t kTriggerWarmUps = 3;
/// Most processes of one rank each that a run may start.
constexpr std::uint32_t kRanksMax = 64;
/// Share of the available memory that arenas may take.
constexpr double kMemoryShare = 0.8;

/// One line that is written over, on a terminal; nothing elsewhere.
class Progress {
 public:
  explicit Progress(std::ostream& err) : err_(err), on_(::isatty(STDERR_FILENO) == 1) {}
  ~Progress() { Clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(const std::string& text) {
    if (!on_) return;
    err_ << "\r\033[K" << text << std::flush;
    shown_ = true;
  }
  void Clear() {
    if (shown_) err_ << "\r\033[K" << std::flush;
    shown_ = false;
  }

 private:
  std::ostream& err_;
  bool on_;
  bool shown_ = false;
};

std::vector<std::string> WantedPeers(const std::vector<std::string>& asked) {
  if (std::find(asked.begin(), asked.end(), "all") != asked.end()) return PeerTeam::Known();
  std::vector<std::string> wanted;
  for (const std::string& name : asked) {
    if (name.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) continue;
    wanted.push_back(name);
  }
  return wanted;
}

/// That the file and the folder can be made where they are asked for: not found out after the
/// measuring.
Status CheckWritable(const BenchOptions& options) {
  if (!options.html.empty()) {
    TB_RETURN_IF_ERROR(OutputFile::Create(options.html).status().Annotate("--html"));
  }
  if (options.log_dir.empty()) return {};
  std::error_code error;
  std::filesystem::create_directories(options.log_dir, error);
  if (!error && ::access(options.log_dir.c_str(), W_OK | X_OK) == 0) return {};
  return ErrnoStatus(error ? error.value() : errno, "--log-dir " + options.log_dir);
}

Status CheckPeers(const std::vector<std::string>& asked) {
  for (const std::string& name : asked) {
    const auto& known = PeerTeam::Known();
    if (name == "all" || std::find(known.begin(), known.end(), name) != known.end()) continue;
    return Malformed(
        fmt::format("no peer '{}'; known are {} and all", name, fmt::join(known, ", ")));
  }
  return {};
}

Status CheckOptions(const BenchOptions& options) {
  if (options.bus.transport != "shm" && options.bus.transport != "tcp") {
    return Malformed(
        fmt::format("no transport '{}' here; known are shm, tcp", options.bus.transport));
  }
  TB_RETURN_IF_ERROR(ParseMemoryMode(options.bus.memory).status());
  TB_RETURN_IF_ERROR(ParseProof(options.bus.proof).status());
  TB_RETURN_IF_ERROR(ParseFlipMode(options.bus.flip).status());
  if (!options.fault.empty()) TB_RETURN_IF_ERROR(ParseInjection(options.fault).status());
  TB_RETURN_IF_ERROR(CheckPeers(options.peers));
  return CheckWritable(options);
}

Status CheckFits(const Workload& workload, const BenchOptions& options, const HostInfo& host) {
  const std::uint64_t ranks =
      workload.source.rank_count + std::uint64_t{workload.target_processes()};
  if (ranks > kRanksMax) {
    return {Code::kResourceExhausted,
            fmt::format("{} ranks are more processes than one host should run (at most {})", ranks,
                        kRanksMax)};
  }
  // Ours, a shadow if any, the ceilings' and each peer's arenas.
  const std::uint64_t sets =
      2 + WantedPeers(options.peers).size() + (options.bus.flip == "shadow" ? 1 : 0);
  const double needed = static_cast<double>(ArenaBytes(workload)) * static_cast<double>(sets);
  const double available = static_cast<double>(host.ram_available_bytes);
  if (needed > available * kMemoryShare) {
    return {Code::kResourceExhausted,
            fmt::format("the arenas need {:.1f} GB; {:.1f} GB of memory are available",
                        needed * 1e-9, available * 1e-9),
            Reason::kOutOfMemory};
  }
  return {};
}

/// One workload from the start of its processes to the figures.
class BenchSession {
 public:
  BenchSession(const BenchOptions& options, const Workload& workload, Crew& crew,
               Progress& progress)
      : options_(options), workload_(workload), crew_(crew), progress_(progress) {
    result_.workload = workload.name;
    result_.source_ranks = workload.source.rank_count;
    result_.target_ranks = workload.target.rank_count;
    result_.replicas = workload.replicas;
    result_.tensors = workload.target.tensors.size();
    result_.scale = options.workload.scale;
    result_.settings = options.bus;
    result_.host = DescribeHost();
    result_.bytes = ArrivingBytes(workload);
  }

  Status Run() {
    Show("starting");
    TB_ASSIGN_OR_RETURN(const BenchBus bus, BenchBus::Start(crew_, options_.bus));
    TB_ASSIGN_OR_RETURN(BenchTeam team,
                        BenchTeam::Start(crew_, bus, options_.bus, workload_, "bench"));
    result_.register_seconds = team.register_seconds();
    result_.prefault_seconds = team.prefault_seconds();
    result_.memory_note = team.memory_note();
    TB_ASSIGN_OR_RETURN(CeilingTeam ceilings,
                        CeilingTeam::Start(crew_, workload_, options_.bus.timeout));
    TB_RETURN_IF_ERROR(StartPeers());
    TB_RETURN_IF_ERROR(Measure(team, ceilings));
    result_.worker_rss_bytes_peak = team.PeakRssBytes();
    result_.rss_bytes_peak = bus.PeakRssBytes(crew_);
    team.Stop();
    ceilings.Stop();
    for (std::optional<PeerTeam>& peer : peers_) {
      if (peer.has_value()) peer->Stop();
    }
    TB_RETURN_IF_ERROR(MeasureTrigger(bus));
    result_.staging_bytes_peak = bus.PeakStagingBytes(crew_);
    result_.verified = true;
    return {};
  }

  OrderedJson Report() const { return ToJson(result_); }

 private:
  void Show(const std::string& what) {
    progress_.Show(fmt::format("{}: {}", workload_.name, what));
  }

  /// A peer that does not start is left out, and the report says why. Error: kCancelled.
  Status StartPeers() {
    for (const std::string& name : WantedPeers(options_.peers)) {
      Show("starting " + name);
      PeerResult peer;
      peer.name = name;
      auto team = PeerTeam::Start(crew_, name, workload_, options_.bus.timeout);
      if (!team.ok() && team.status().code() == Code::kCancelled) return team.status();
      peer.ran = team.ok();
      if (!team.ok()) peer.why = team.status().message();
      peers_.emplace_back();
      if (team.ok()) {
        peer.setup_seconds = team->setup_seconds();
        peers_.back().emplace(*std::move(team));
      }
      result_.peers.push_back(std::move(peer));
    }
    return {};
  }

  /// One lap of everything, then the next: what disturbs the machine disturbs all alike.
  Status Measure(BenchTeam& team, CeilingTeam& ceilings) {
    for (std::uint32_t lap = 0; lap <= options_.iterations; ++lap) {
      const std::uint64_t version = lap + 1;
      if (lap == 1 && !options_.fault.empty()) return Inject(team, version);
      Show(lap == 0 ? "first refresh" : fmt::format("{}/{}", lap, options_.iterations));
      TB_ASSIGN_OR_RETURN(const Lap times, team.Refresh(version));
      TB_RETURN_IF_ERROR(team.Verify(version));
      if (lap == 0) {
        result_.first = times;
      } else {
        result_.laps.push_back(times);
      }
      for (std::size_t p = 0; p < peers_.size(); ++p) {
        if (!peers_[p].has_value()) continue;
        const Status status = MeasurePeer(*peers_[p], result_.peers[p], version);
        if (status.code() == Code::kCancelled) return status;
        if (status.ok()) continue;
        peers_[p]->Stop();
        peers_[p].reset();
        result_.peers[p].ran = false;
        result_.peers[p].why = status.message();
      }
      TB_RETURN_IF_ERROR(ceilings.Run(version));
    }
    result_.memcpy_gb_per_s = ceilings.memcpy_gb_per_s();
    result_.ntcopy_gb_per_s = ceilings.stream_gb_per_s();
    result_.socket_gb_per_s = ceilings.socket_gb_per_s();
    return {};
  }

  Status Inject(BenchTeam& team, std::uint64_t version) {
    Show("injecting " + options_.fault);
    TB_ASSIGN_OR_RETURN(const Injection fault, ParseInjection(options_.fault));
    TB_RETURN_IF_ERROR(team.RefreshWith(fault, version));
    return {Code::kInternal, fmt::format("nobody noticed the fault {}", options_.fault)};
  }

  static Status MeasurePeer(PeerTeam& team, PeerResult& result, std::uint64_t version) {
    TB_ASSIGN_OR_RETURN(const double seconds, team.Run(version));
    TB_RETURN_IF_ERROR(team.Verify(version));
    result.verified = true;
    if (version == 1) {
      result.first_seconds = seconds;
    } else {
      result.seconds.push_back(seconds);
      result.cpu_seconds.push_back(team.cpu_seconds());
    }
    result.rss_bytes_peak = team.PeakRssBytes();
    return {};
  }

  Status MeasureTrigger(const BenchBus& bus) {
    Show("trigger");
    TB_ASSIGN_OR_RETURN(const Workload trigger, TriggerWorkload(workload_));
    TB_ASSIGN_OR_RETURN(BenchTeam team,
                        BenchTeam::Start(crew_, bus, options_.bus, trigger, "trigger"));
    const std::uint32_t laps = std::min(kTriggerLaps, options_.iterations * 5);
    for (std::uint32_t lap = 1; lap <= kTriggerWarmUps + laps; ++lap) {
      TB_ASSIGN_OR_RETURN(const Lap times, team.Refresh(lap));
      TB_RETURN_IF_ERROR(team.Verify(lap));
      if (lap > kTriggerWarmUps) result_.trigger_seconds.push_back(times.seconds);
    }
    team.Stop();
    return {};
  }

  const BenchOptions& options_;
  const Workload& workload_;
  Crew& crew_;
  Progress& progress_;
  BenchResult result_;
  std::vector<std::optional<PeerTeam>> peers_;  // beside result_.peers
};

/// Keeps what the processes wrote, for whoever asked for it.
Status KeepLogs(const Crew& crew, const std::string& log_dir, const std::string& workload) {
  if (log_dir.empty()) return {};
  namespace fs = std::filesystem;
  std::error_code error;
  std::string name = workload;
  std::replace(name.begin(), name.end(), '/', '-');
  const fs::path folder = fs::path(log_dir) / name;
  fs::create_directories(folder, error);
  if (error) return ErrnoStatus(error.value(), folder.string());
  for (fs::directory_iterator at(crew.folder(), error), end; !error && at != end;
       at.increment(error)) {
    if (at->path().extension() != ".log") continue;
    const fs::path kept = folder / at->path().filename();
    fs::copy_file(at->path(), kept, fs::copy_options::overwrite_existing, error);
    if (!error) continue;
    const Status failed = ErrnoStatus(error.value(), kept.string());
    fs::remove(kept, error);  // half a log misleads
    return failed;
  }
  return error ? ErrnoStatus(error.value(), crew.folder()) : Status();
}

Result<OrderedJson> RunOne(const BenchOptions& options, const Workload& workload,
                           std::ostream& err) {
  TB_ASSIGN_OR_RETURN(Crew crew, Crew::Create());
  Progress progress(err);
  BenchSession session(options, workload, crew, progress);
  const Status status = session.Run();
  progress.Clear();
  // A refusal explains itself; for a silence the logs may.
  const bool silence =
      status.code() == Code::kDeadlineExceeded || status.reason() == Reason::kPeerLost;
  if (silence) err << crew.LogTails();
  crew.StopAll();
  const Status kept = KeepLogs(crew, options.log_dir, workload.name)
                          .Annotate("the logs could not be kept in --log-dir");
  if (!status.ok()) {
    if (!kept.ok()) err << "tensorbusctl bench: " << Printable(kept.message()) << "\n";
    return status.Annotate("workload " + workload.name);
  }
  OrderedJson report = session.Report();
  PrintBench(report, err);
  if (!kept.ok()) return kept;
  return report;
}

int Fail(const BenchOptions& options, const Status& status, int exit_code, std::ostream& out,
         std::ostream& err) {
  err << "tensorbusctl bench: " << Printable(status.message()) << "\n";
  if (options.json) {
    OrderedJson answer;
    answer["error"]["code"] = CodeName(status.code());
    answer["error"]["reason"] = ReasonName(status.reason());
    answer["error"]["message"] = status.message();
    if (!options.fault.empty()) answer["fault"] = options.fault;
    out << Dump(answer) << "\n";
  }
  return exit_code;
}

/// As a shell says it of who is ended by a signal; we have ended the processes first.
int ExitCodeAfterRun(const Status& status) {
  constexpr int kSignalled = 128;
  const bool stopped = status.code() == Code::kCancelled && status.native() > 0;
  return stopped ? kSignalled + static_cast<int>(status.native()) : kExitFailed;
}

}  // namespace

int RunBench(const BenchOptions& options, std::ostream& out, std::ostream& err) {
  const Status checked = CheckOptions(options);
  if (!checked.ok()) return Fail(options, checked, kExitUsage, out, err);
  const auto workloads = ChooseWorkloads(options.workload);
  if (!workloads.ok()) {
    return Fail(options, workloads.status(), ExitCodeFor(workloads.status()), out, err);
  }
  const HostInfo host = DescribeHost();
  for (const Workload& workload : *workloads) {
    const Status fits = CheckFits(workload, options, host);
    if (!fits.ok()) {
      return Fail(options, fits.Annotate("workload " + workload.name), kExitFailed, out, err);
    }
  }
  std::vector<OrderedJson> reports;
  for (const Workload& workload : *workloads) {
    auto report = RunOne(options, workload, err);
    if (!report.ok()) {
      return Fail(options, report.status(), ExitCodeAfterRun(report.status()), out, err);
    }
    reports.push_back(*std::move(report));
  }
  if (!options.html.empty()) {
    const Status written = WriteBenchPage(reports, options.html);
    if (!written.ok()) return Fail(options, written, kExitFailed, out, err);
    err << "written: " << options.html << "\n";
  }
  if (options.json) {
    const bool several = reports.size() != 1 || options.workload.name == "all";
    out << Dump(several ? OrderedJson{{"results", reports}} : reports.front()) << "\n";
  }
  return kExitFine;
}

}  // namespace tensorbus::cli
