#include "tensorbus/cli/bench_bus.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/cli/bench_metrics.h"
#include "tensorbus/cli/output_file.h"
#include "tensorbus/cli/programs.h"

namespace tensorbus::cli {
namespace {

/// Whether something accepts connections at a UNIX socket.
bool Listens(const std::string& path) {
  const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (!fd.valid() || path.size() >= sizeof address.sun_path) return false;
  std::copy(path.begin(), path.end(), address.sun_path);
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

Status AwaitListening(Crew& crew, const std::string& path, const std::string& who, Nanos timeout) {
  return crew.Await([&path] { return Listens(path); }, Clock::Real().Now() + timeout,
                    who + " to listen at " + path);
}

/// Names of the source's tensors that the target has not.
std::vector<std::string> LeftOut(const Workload& workload) {
  std::unordered_set<std::string_view> wanted;
  for (const JobLayout::Tensor& tensor : workload.target.tensors) wanted.insert(tensor.spec.name);
  std::vector<std::string> left;
  for (const JobLayout::Tensor& tensor : workload.source.tensors) {
    if (wanted.count(tensor.spec.name) == 0) left.push_back(tensor.spec.name);
  }
  return left;
}

constexpr std::array<std::pair<const char*, Injection>, 4> kInjections = {
    {{"stray-write", Injection::kStrayWrite},
     {"damage", Injection::kDamage},
     {"dead-source", Injection::kDeadSource},
     {"dead-target", Injection::kDeadTarget}}};

}  // namespace

std::string InjectionNames() {
  std::vector<const char*> names;
  for (const auto& [name, injection] : kInjections) names.push_back(name);
  return fmt::format("{}", fmt::join(names, ", "));
}

Result<Injection> ParseInjection(const std::string& text) {
  for (const auto& [name, injection] : kInjections) {
    if (text == name) return injection;
  }
  return Malformed(fmt::format("no fault '{}'; known are {}", text, InjectionNames()));
}

Result<std::string> WriteLayout(const Crew& crew, const std::string& name,
                                const JobLayout& layout) {
  const std::string path = crew.folder() + "/" + name + ".layout";
  const std::vector<std::byte> bytes = Serialize(layout);
  TB_RETURN_IF_ERROR(WriteFile({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path));
  return path;
}

Result<BenchBus> BenchBus::Start(Crew& crew, const BusSettings& settings) {
  BenchBus bus;
  TB_ASSIGN_OR_RETURN(const std::string daemon, FindProgram("tensorbusd"));
  TB_ASSIGN_OR_RETURN(const std::string agent, FindProgram("tensorbus-agent"));
  const std::string daemon_socket = crew.folder() + "/daemon.sock";
  const auto start = [&](const std::string& name, std::vector<std::string> argv) -> Status {
    TB_ASSIGN_OR_RETURN(const Crew::Member member,
                        crew.Start({.name = name, .argv = std::move(argv), .speaks = false}));
    bus.services_.push_back(member);
    return {};
  };
  TB_RETURN_IF_ERROR(start("tensorbusd", {daemon, "--listen", "unix:" + daemon_socket}));
  TB_RETURN_IF_ERROR(AwaitListening(crew, daemon_socket, "tensorbusd", settings.timeout));
  const bool remote = settings.transport == "tcp";
  bus.source_socket_ = crew.folder() + "/agent-a.sock";
  bus.target_socket_ = remote ? crew.folder() + "/agent-b.sock" : bus.source_socket_;
  for (const char* letter : {"a", "b"}) {
    const std::string socket = fmt::format("{}/agent-{}.sock", crew.folder(), letter);
    if (socket != bus.source_socket_ && socket != bus.target_socket_) continue;
    std::vector<std::string> argv = {agent,
                                     "--daemon",
                                     "unix:" + daemon_socket,
                                     "--socket",
                                     socket,
                                     "--name",
                                     fmt::format("bench-{}", letter),
                                     "--host",
                                     fmt::format("bench-host-{}", letter),
                                     "--metrics-listen",
                                     "127.0.0.1:0",
                                     "--data-listen",
                                     remote ? "127.0.0.1:0" : "off"};
    argv.insert(argv.end(), settings.agent_flags.begin(), settings.agent_flags.end());
    const std::string name = fmt::format("tensorbus-agent {}", letter);
    TB_RETURN_IF_ERROR(start(name, std::move(argv)));
    TB_RETURN_IF_ERROR(AwaitListening(crew, socket, name, settings.timeout));
  }
  return bus;
}

std::uint64_t BenchBus::CpuNs(const Crew& crew) const {
  std::uint64_t total = 0;
  for (const Crew::Member member : services_) total += crew.CpuNs(member);
  return total;
}

std::uint64_t BenchBus::PeakRssBytes(const Crew& crew) const {
  std::uint64_t total = 0;
  for (const Crew::Member member : services_) total += crew.PeakRssBytes(member);
  return total;
}

std::optional<std::uint64_t> BenchBus::PeakStagingBytes(const Crew& crew) const {
  std::uint64_t total = 0;
  for (std::size_t i = 1; i < services_.size(); ++i) {
    const auto peak = ReadMetric(crew.LogPath(services_[i]), "tensorbus_agent_staging_peak_bytes");
    if (!peak.has_value()) return std::nullopt;
    total += static_cast<std::uint64_t>(*peak);
  }
  return total;
}

Result<BenchTeam> BenchTeam::Start(Crew& crew, const BenchBus& bus, const BusSettings& settings,
                                   const Workload& workload, const std::string& channel) {
  BenchTeam team(crew, bus, settings.timeout);
  TB_ASSIGN_OR_RETURN(const std::string source,
                      WriteLayout(crew, channel + "-source", workload.source));
  TB_ASSIGN_OR_RETURN(const std::string target,
                      WriteLayout(crew, channel + "-target", workload.target));
  const std::vector<std::string> common = {
      "--channel", channel,         "--replicas", std::to_string(workload.replicas),
      "--flip",    settings.flip,   "--proof",    settings.proof,
      "--memory",  settings.memory, "--timeout",  fmt::format("{:.3f}", Seconds(settings.timeout))};
  const std::vector<std::string> left_out = LeftOut(workload);
  const auto start = [&](bool is_source, std::uint32_t rank, std::uint32_t replica) -> Status {
    CrewSpec spec;
    spec.name = is_source                ? fmt::format("source {}", rank)
                : workload.replicas == 1 ? fmt::format("target {}", rank)
                                         : fmt::format("replica {} target {}", replica, rank);
    spec.argv = {OwnPath(),        "bench-worker",
                 "--role",         is_source ? "source" : "target",
                 "--layout",       is_source ? source : target,
                 "--agent-socket", is_source ? bus.source_socket() : bus.target_socket(),
                 "--rank",         std::to_string(rank),
                 "--replica",      std::to_string(replica)};
    spec.argv.insert(spec.argv.end(), common.begin(), common.end());
    if (!is_source) {
      for (const std::string& name : left_out) spec.argv.push_back("--leave-out=" + name);
    }
    TB_ASSIGN_OR_RETURN(const Crew::Member member, crew.Start(spec));
    (is_source ? team.sources_ : team.targets_).push_back(member);
    return {};
  };
  for (std::uint32_t r = 0; r < workload.source.rank_count; ++r) {
    TB_RETURN_IF_ERROR(start(true, r, 0));
  }
  for (std::uint32_t replica = 0; replica < workload.replicas; ++replica) {
    for (std::uint32_t r = 0; r < workload.target.rank_count; ++r) {
      TB_RETURN_IF_ERROR(start(false, r, replica));
    }
  }
  TB_RETURN_IF_ERROR(team.Register());
  return team;
}

Status BenchTeam::Register() {
  std::vector<Crew::Member> all = sources_;
  all.insert(all.end(), targets_.begin(), targets_.end());
  TB_ASSIGN_OR_RETURN(const auto replies,
                      crew_->Ask(all, {.command = BenchCommand::kHello},
                                 Clock::Real().Now() + timeout_, "registering"));
  for (const BenchReply& reply : replies) {
    register_seconds_ = std::max(register_seconds_, reply.values[kRegisterSeconds]);
    prefault_seconds_ = std::max(prefault_seconds_, reply.values[kPrefaultSeconds]);
  }
  memory_note_ = replies.back().text;
  return {};
}

Result<Lap> BenchTeam::Refresh(std::uint64_t version) {
  const TimePoint deadline = Clock::Real().Now() + timeout_;
  const std::string what = fmt::format("refresh to version {}", version);
  TB_RETURN_IF_ERROR(
      crew_->Ask(targets_, {.command = BenchCommand::kAsk}, deadline, "asking").status());
  TB_RETURN_IF_ERROR(crew_
                         ->Ask(sources_, {.command = BenchCommand::kWrite, .version = version},
                               deadline, "rewriting every tensor")
                         .status());
  for (const Crew::Member target : targets_) {
    TB_RETURN_IF_ERROR(crew_->Send(target, {.command = BenchCommand::kWait, .version = version}));
  }
  const std::uint64_t cpu = bus_->CpuNs(*crew_);
  for (const Crew::Member source : sources_) {
    TB_RETURN_IF_ERROR(
        crew_->Send(source, {.command = BenchCommand::kPublish, .version = version}));
  }
  std::vector<Crew::Member> all = sources_;
  all.insert(all.end(), targets_.begin(), targets_.end());
  TB_ASSIGN_OR_RETURN(const std::vector<BenchReply> replies, crew_->Collect(all, deadline, what));
  Lap lap;
  lap.cpu_seconds = static_cast<double>(bus_->CpuNs(*crew_) - cpu) * 1e-9;
  std::uint64_t published = 0;
  std::uint64_t live = 0;
  for (std::size_t i = 0; i < replies.size(); ++i) {
    const BenchReply& reply = replies[i];
    lap.cpu_seconds += static_cast<double>(reply.cpu_ns) * 1e-9;
    if (i < sources_.size()) {
      published = std::max(published, reply.begin_ns);
      lap.accept_seconds = std::max(lap.accept_seconds, reply.values[kAcceptSeconds]);
      lap.blocked_seconds = std::max(lap.blocked_seconds, reply.values[kBlockedSeconds]);
    } else {
      live = std::max(live, reply.end_ns);
      lap.session_seconds = std::max(lap.session_seconds, reply.values[kSessionSeconds]);
      lap.copy_seconds = std::max(lap.copy_seconds, reply.values[kCopySeconds]);
    }
  }
  lap.seconds = static_cast<double>(live - published) * 1e-9;
  return lap;
}

Status BenchTeam::Misbehave(const std::vector<Crew::Member>& ranks, BenchFault fault) {
  const BenchMessage message = {.command = BenchCommand::kFault,
                                .a = static_cast<std::uint64_t>(fault)};
  return crew_
      ->Ask(std::span(ranks).first(1), message, Clock::Real().Now() + timeout_, "a fault injected")
      .status();
}

Status BenchTeam::RefreshWith(Injection fault, std::uint64_t version) {
  if (fault == Injection::kDamage) {
    TB_RETURN_IF_ERROR(Refresh(version).status());
    TB_RETURN_IF_ERROR(Misbehave(targets_, BenchFault::kWriteByte));
    return Verify(version);
  }
  const TimePoint deadline = Clock::Real().Now() + timeout_;
  const auto ask = [&](const std::vector<Crew::Member>& members, BenchCommand command,
                       const std::string& what) {
    const BenchMessage message = {.command = command, .count = 1, .version = version};
    return crew_->Ask(members, message, deadline, what).status();
  };
  TB_RETURN_IF_ERROR(ask(sources_, BenchCommand::kWrite, "rewriting every tensor"));
  TB_RETURN_IF_ERROR(ask(sources_, BenchCommand::kPublish, "publishing"));
  if (fault != Injection::kDeadTarget) {
    const bool dies = fault == Injection::kDeadSource;
    TB_RETURN_IF_ERROR(Misbehave(sources_, dies ? BenchFault::kDie : BenchFault::kWriteByte));
  }
  TB_RETURN_IF_ERROR(ask(targets_, BenchCommand::kAsk, "asking"));
  if (fault == Injection::kDeadTarget) {
    TB_RETURN_IF_ERROR(Misbehave(targets_, BenchFault::kDie));
  }
  TB_RETURN_IF_ERROR(
      ask(targets_, BenchCommand::kWait, fmt::format("refresh to version {}", version)));
  return Verify(version);
}

Status BenchTeam::Verify(std::uint64_t version) {
  return crew_
      ->Ask(targets_, {.command = BenchCommand::kVerify, .version = version},
            Clock::Real().Now() + timeout_, "comparing every element")
      .status();
}

void BenchTeam::Stop() {
  std::vector<Crew::Member> all = targets_;
  all.insert(all.end(), sources_.begin(), sources_.end());
  crew_->Stop(all);
}

std::uint64_t BenchTeam::PeakRssBytes() const {
  std::uint64_t total = 0;
  for (const Crew::Member member : sources_) total += crew_->PeakRssBytes(member);
  for (const Crew::Member member : targets_) total += crew_->PeakRssBytes(member);
  return total;
}

}  // namespace tensorbus::cli
