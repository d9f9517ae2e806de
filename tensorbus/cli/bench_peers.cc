#include "tensorbus/cli/bench_peers.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "tensorbus/cli/bench_bus.h"
#include "tensorbus/cli/bench_pattern.h"
#include "tensorbus/cli/bench_scripts.h"
#include "tensorbus/cli/bench_stats.h"
#include "tensorbus/cli/programs.h"

namespace tensorbus::cli {
namespace {

constexpr const char* kPeerProgram = "tensorbus-bench-peer";

BenchGo* PageOf(const Mapping& mapping) {
  return reinterpret_cast<BenchGo*>(mapping.data());
}

double SecondsBetween(std::uint64_t begin_ns, std::uint64_t end_ns) {
  return static_cast<double>(end_ns - begin_ns) * 1e-9;
}

}  // namespace

const std::vector<std::string>& PeerTeam::Known() {
  static const std::vector<std::string> kKnown = {"hand-shm", "hand-cma", "gather-broadcast",
                                                  "gloo-p2p", "gloo-bucket"};
  return kKnown;
}

Status PeerTeam::MakeGoPage() {
  TB_ASSIGN_OR_RETURN(go_fd_, CreateMemfd("bench-go", sizeof(BenchGo)));
  TB_ASSIGN_OR_RETURN(go_,
                      Mapping::Create(go_fd_.get(), sizeof(BenchGo), Mapping::Access::kReadWrite));
  return {};
}

Status PeerTeam::StartHand(const std::string& kind, const Workload& workload) {
  TB_ASSIGN_OR_RETURN(const std::string program, FindProgram(kPeerProgram));
  TB_ASSIGN_OR_RETURN(const std::string source,
                      WriteLayout(*crew_, kind + "-source", workload.source));
  TB_ASSIGN_OR_RETURN(const std::string target,
                      WriteLayout(*crew_, kind + "-target", workload.target));
  if (kind == "hand-shm") {
    for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
      TB_ASSIGN_OR_RETURN(UniqueFd arena,
                          CreateMemfd("hand-source", PlaceRank(workload.source, r).bytes));
      arenas_.push_back(std::move(arena));
    }
  }
  std::vector<std::string> common = {program,    kind,   "--source", source,
                                     "--target", target, "--go",     std::to_string(go_fd_.get())};
  std::vector<int> descriptors = {go_fd_.get()};
  if (!arenas_.empty()) common.emplace_back("--arena");
  for (const UniqueFd& arena : arenas_) {
    common.push_back(std::to_string(arena.get()));
    descriptors.push_back(arena.get());
  }
  const auto start = [&](const std::string& name, bool is_source, std::uint32_t rank) -> Status {
    CrewSpec spec = {.name = kind + " " + name, .argv = common, .descriptors = descriptors};
    spec.argv.insert(spec.argv.end(),
                     {"--role", is_source ? "source" : "target", "--rank", std::to_string(rank),
                      "--slot", std::to_string(is_source ? 0 : runners_.size())});
    TB_ASSIGN_OR_RETURN(const Crew::Member member, crew_->Start(spec));
    (is_source ? sources_ : targets_).push_back(member);
    if (!is_source) runners_.push_back(member);
    return {};
  };
  for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
    TB_RETURN_IF_ERROR(start(fmt::format("source {}", r), true, r));
  }
  for (std::uint32_t t = 0; t < workload.target_processes(); ++t) {
    TB_RETURN_IF_ERROR(start(fmt::format("target {}", t), false, t % workload.target.rank_count));
  }
  return {};
}

Status PeerTeam::StartScript(const std::string& kind, const Workload& workload) {
  TB_ASSIGN_OR_RETURN(const ScriptPeer script, PrepareScriptPeer(*crew_, kind, workload, timeout_));
  for (std::uint32_t p = 0; p < script.process_count; ++p) {
    const bool is_source = p < workload.source.rank_count;
    CrewSpec spec;
    spec.name = fmt::format("{} {} {}", kind, is_source ? "source" : "target",
                            is_source ? p : p - workload.source.rank_count);
    spec.argv = script.argv;
    spec.argv.insert(spec.argv.end(),
                     {"--process", std::to_string(p), "--go", std::to_string(go_fd_.get())});
    spec.descriptors = {go_fd_.get()};
    TB_ASSIGN_OR_RETURN(const Crew::Member member, crew_->Start(spec));
    (is_source ? sources_ : targets_).push_back(member);
    runners_.push_back(member);
  }
  return {};
}

/// Everybody set up, and hand-cma's targets told where the sources' memory is.
Status PeerTeam::Introduce() {
  const TimePoint deadline = Clock::Real().Now() + timeout_;
  std::vector<Crew::Member> all = sources_;
  all.insert(all.end(), targets_.begin(), targets_.end());
  TB_ASSIGN_OR_RETURN(const auto replies,
                      crew_->Ask(all, {.command = BenchCommand::kHello}, deadline, "setting up"));
  for (std::size_t s = 0; s < sources_.size(); ++s) {
    if (replies[s].address == 0) continue;
    const BenchMessage message = {.command = BenchCommand::kPeer,
                                  .count = static_cast<std::uint32_t>(s),
                                  .a = replies[s].address,
                                  .b = static_cast<std::uint64_t>(crew_->pid(sources_[s]))};
    TB_RETURN_IF_ERROR(crew_->Ask(targets_, message, deadline, "setting up").status());
  }
  return {};
}

Result<PeerTeam> PeerTeam::Start(Crew& crew, const std::string& kind, const Workload& workload,
                                 Nanos timeout) {
  PeerTeam team(crew, timeout);
  const TimePoint start = Clock::Real().Now();
  TB_RETURN_IF_ERROR(team.MakeGoPage());
  const bool hand = kind.rfind("hand-", 0) == 0;
  Status started = hand ? team.StartHand(kind, workload) : team.StartScript(kind, workload);
  if (started.ok() && team.runners_.size() > BenchGo::kSlots) {
    started =
        Status(Code::kResourceExhausted, fmt::format("more than {} processes", BenchGo::kSlots));
  }
  if (started.ok()) started = team.Introduce();
  if (!started.ok()) {
    // Who is cancelled stops everything, and faster.
    if (started.code() != Code::kCancelled) team.Stop();
    return started;
  }
  team.setup_seconds_ = Seconds(Clock::Real().Now() - start);
  return team;
}

Result<double> PeerTeam::Run(std::uint64_t version) {
  const TimePoint deadline = Clock::Real().Now() + timeout_;
  TB_RETURN_IF_ERROR(crew_
                         ->Ask(sources_, {.command = BenchCommand::kWrite, .version = version},
                               deadline, "rewriting every tensor")
                         .status());
  const std::uint32_t go = ++runs_;
  for (const Crew::Member runner : runners_) {
    TB_RETURN_IF_ERROR(
        crew_->Send(runner, {.command = BenchCommand::kRun, .count = go, .version = version}));
  }
  BenchGo* page = PageOf(go_);
  const auto all_ready = [page, go, this] {
    for (std::size_t slot = 0; slot < runners_.size(); ++slot) {
      if (page->slots[slot].ready.load(std::memory_order_acquire) != go) return false;
    }
    return true;
  };
  TB_RETURN_IF_ERROR(crew_->Await(all_ready, deadline, "everybody to stand ready"));
  const std::uint64_t begin = MonotonicNs();
  page->go.store(go, std::memory_order_release);
  TB_ASSIGN_OR_RETURN(const auto replies, crew_->Collect(runners_, deadline, "moving"));
  std::uint64_t end = begin;
  cpu_seconds_ = 0;
  for (const BenchReply& reply : replies) {
    end = std::max(end, reply.end_ns);
    cpu_seconds_ += static_cast<double>(reply.cpu_ns) * 1e-9;
  }
  return SecondsBetween(begin, end);
}

Status PeerTeam::Verify(std::uint64_t version) {
  return crew_
      ->Ask(targets_, {.command = BenchCommand::kVerify, .version = version},
            Clock::Real().Now() + timeout_, "comparing every element")
      .status();
}

void PeerTeam::Stop() {
  std::vector<Crew::Member> all = targets_;
  all.insert(all.end(), sources_.begin(), sources_.end());
  crew_->Stop(all);
}

std::uint64_t PeerTeam::PeakRssBytes() const {
  std::uint64_t total = 0;
  for (const Crew::Member member : sources_) total += crew_->PeakRssBytes(member);
  for (const Crew::Member member : targets_) total += crew_->PeakRssBytes(member);
  return total;
}

Result<CeilingTeam> CeilingTeam::Start(Crew& crew, const Workload& workload, Nanos timeout) {
  TB_ASSIGN_OR_RETURN(const std::string program, FindProgram(kPeerProgram));
  std::uint64_t source_bytes = 0;
  for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
    source_bytes += PlaceRank(workload.source, r).bytes;
  }
  CeilingTeam team(crew, timeout);
  TB_ASSIGN_OR_RETURN(
      team.member_,
      crew.Start({.name = "ceilings",
                  .argv = {program, "ceiling", "--source-bytes", std::to_string(source_bytes),
                           "--target-bytes", std::to_string(ArrivingBytes(workload))}}));
  TB_RETURN_IF_ERROR(crew.Ask(std::span(&team.member_, 1), {.command = BenchCommand::kHello},
                              Clock::Real().Now() + timeout, "setting up")
                         .status());
  return team;
}

Status CeilingTeam::Run(std::uint64_t version) {
  const std::span<const Crew::Member> self(&member_, 1);
  const TimePoint deadline = Clock::Real().Now() + timeout_;
  for (const BenchCeiling which : {BenchCeiling::kMemcpy, BenchCeiling::kStream,
                                   BenchCeiling::kSocket1, BenchCeiling::kSocket2}) {
    TB_RETURN_IF_ERROR(crew_
                           ->Ask(self, {.command = BenchCommand::kWrite, .version = version},
                                 deadline, "rewriting")
                           .status());
    TB_ASSIGN_OR_RETURN(
        const auto replies,
        crew_->Ask(self, {.command = BenchCommand::kRun, .a = static_cast<std::uint64_t>(which)},
                   deadline, "copying"));
    std::vector<double>& rates = rates_[static_cast<std::size_t>(which)];
    if (rates.empty()) {
      TB_RETURN_IF_ERROR(
          crew_->Ask(self, {.command = BenchCommand::kVerify}, deadline, "comparing").status());
    }
    const double seconds = SecondsBetween(replies[0].begin_ns, replies[0].end_ns);
    rates.push_back(static_cast<double>(replies[0].bytes) / std::max(seconds, 1e-9) * 1e-9);
  }
  return {};
}

void CeilingTeam::Stop() {
  crew_->Stop(std::span(&member_, 1));
}

double CeilingTeam::Median(BenchCeiling which) const {
  return MedianOf(rates_[static_cast<std::size_t>(which)]);
}

double CeilingTeam::memcpy_gb_per_s() const {
  return Median(BenchCeiling::kMemcpy);
}

double CeilingTeam::stream_gb_per_s() const {
  return Median(BenchCeiling::kStream);
}

double CeilingTeam::socket_gb_per_s() const {
  return std::max(Median(BenchCeiling::kSocket1), Median(BenchCeiling::kSocket2));
}

}  // namespace tensorbus::cli
