#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tensorbus/cli/bench_crew.h"
#include "tensorbus/cli/bench_workload.h"

namespace tensorbus::cli {

/// How our side of a benchmark runs.
struct BusSettings {
  std::string transport = "shm";
  std::string memory = "mapped";
  std::string proof = "readback";
  std::string flip = "in_place";
  std::vector<std::string> agent_flags;      ///< passed on to every agent
  Nanos timeout = std::chrono::seconds(60);  ///< of any one step
};

/// Times of one refresh. Seconds.
struct Lap {
  double seconds = 0;  ///< last source's publish call to the flip at the last target
  double session_seconds = 0;
  double copy_seconds = 0;
  double accept_seconds = 0;   ///< publish call until accepted: receipts, when they are asked for
  double blocked_seconds = 0;  ///< publish call until the memory may be written again
  double cpu_seconds = 0;      ///< daemon, agents and the workers' own requests
};

/// What goes wrong in a refresh on purpose, to see that it is noticed.
enum class Injection {
  kStrayWrite,  ///< source 0 changes a byte of what it has published, before it is read
  kDamage,      ///< a byte of target 0 changes after the flip
  kDeadSource,  ///< source 0 ends after it has published
  kDeadTarget,  ///< target 0 ends after it has asked for the version
};
/// Error: kInvalidArgument naming the known ones.
Result<Injection> ParseInjection(const std::string& text);
/// "stray-write, damage, …".
std::string InjectionNames();

/// A daemon and its agents: one for all ranks (shm), or one for sources and one for targets (tcp).
/// Its processes belong to the crew.
class BenchBus {
 public:
  /// Starts them and waits until they listen.
  static Result<BenchBus> Start(Crew& crew, const BusSettings& settings);

  const std::string& source_socket() const { return source_socket_; }
  const std::string& target_socket() const { return target_socket_; }
  /// The daemon and the agents.
  const std::vector<Crew::Member>& services() const { return services_; }
  std::uint64_t CpuNs(const Crew& crew) const;
  std::uint64_t PeakRssBytes(const Crew& crew) const;
  /// Most staging that the agents have used, when they say so on their metrics page.
  std::optional<std::uint64_t> PeakStagingBytes(const Crew& crew) const;

 private:
  std::string source_socket_;
  std::string target_socket_;
  std::vector<Crew::Member> services_;
};

/// The ranks of one workload on a running bus.
class BenchTeam {
 public:
  /// Starts and registers every rank. Source ranks have written version 0.
  static Result<BenchTeam> Start(Crew& crew, const BenchBus& bus, const BusSettings& settings,
                                 const Workload& workload, const std::string& channel);

  /// One refresh: every target asks, every source rewrites all and publishes, all targets have it.
  Result<Lap> Refresh(std::uint64_t version);
  /// A refresh in which something goes wrong, compared as by Verify(): never OK unless nobody
  /// noticed. Stray bytes are written when every source's publish is accepted and no target has
  /// asked yet, so that what was published and what is read differ for certain.
  Status RefreshWith(Injection fault, std::uint64_t version);
  /// Every target compares all elements.
  Status Verify(std::uint64_t version);
  /// Ends the ranks.
  void Stop();

  double register_seconds() const { return register_seconds_; }
  double prefault_seconds() const { return prefault_seconds_; }
  /// How the agent reaches the ranks' memory, and why so.
  const std::string& memory_note() const { return memory_note_; }
  std::uint64_t PeakRssBytes() const;

 private:
  BenchTeam(Crew& crew, const BenchBus& bus, Nanos timeout)
      : crew_(&crew), bus_(&bus), timeout_(timeout) {}
  Status Register();
  /// The first of `ranks` does what it should not.
  Status Misbehave(const std::vector<Crew::Member>& ranks, BenchFault fault);

  Crew* crew_;
  const BenchBus* bus_;
  Nanos timeout_;
  std::vector<Crew::Member> sources_;
  std::vector<Crew::Member> targets_;
  double register_seconds_ = 0;
  double prefault_seconds_ = 0;
  std::string memory_note_;
};

/// Writes a job's layout where the processes of a crew read it. Gives the path.
Result<std::string> WriteLayout(const Crew& crew, const std::string& name, const JobLayout& layout);

}  // namespace tensorbus::cli
