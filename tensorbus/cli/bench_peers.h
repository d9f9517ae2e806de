#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorbus/base/mapping.h"
#include "tensorbus/cli/bench_crew.h"
#include "tensorbus/cli/bench_workload.h"

namespace tensorbus::cli {

/// The processes of another way to move a workload, measured beside ours.
///
/// Every process has its own arenas, touched beforehand, and knows beforehand what to move; the
/// time runs from a shared go flag to the last process done. Its processes belong to the crew.
class PeerTeam {
 public:
  /// The names that `--peers all` means.
  static const std::vector<std::string>& Known();

  /// `kind` is one of Known(). Errors: kNotFound or kUnavailable for what cannot run here, saying
  /// why.
  static Result<PeerTeam> Start(Crew& crew, const std::string& kind, const Workload& workload,
                                Nanos timeout);

  /// Rewrites every source tensor, then moves. Seconds.
  Result<double> Run(std::uint64_t version);
  /// Every target compares all elements.
  Status Verify(std::uint64_t version);
  void Stop();

  double setup_seconds() const { return setup_seconds_; }
  /// Processor time of all its processes in the last Run().
  double cpu_seconds() const { return cpu_seconds_; }
  std::uint64_t PeakRssBytes() const;

 private:
  PeerTeam(Crew& crew, Nanos timeout) : crew_(&crew), timeout_(timeout) {}
  Status MakeGoPage();
  Status StartHand(const std::string& kind, const Workload& workload);
  Status StartScript(const std::string& kind, const Workload& workload);
  Status Introduce();

  Crew* crew_;
  Nanos timeout_;
  UniqueFd go_fd_;
  Mapping go_;
  std::vector<UniqueFd> arenas_;
  std::vector<Crew::Member> sources_;
  std::vector<Crew::Member> targets_;
  std::vector<Crew::Member> runners_;  ///< who waits for the go flag, in order of their slots
  std::uint32_t runs_ = 0;
  double setup_seconds_ = 0;
  double cpu_seconds_ = 0;
};

/// What the machine can move at best, measured between the laps. GB/s are of `bytes`.
class CeilingTeam {
 public:
  static Result<CeilingTeam> Start(Crew& crew, const Workload& workload, Nanos timeout);

  /// One measurement of each ceiling.
  Status Run(std::uint64_t version);
  void Stop();

  /// Medians.
  double memcpy_gb_per_s() const;
  double stream_gb_per_s() const;
  double socket_gb_per_s() const;  ///< the better of one and two streams

 private:
  CeilingTeam(Crew& crew, Nanos timeout) : crew_(&crew), timeout_(timeout) {}
  double Median(BenchCeiling which) const;

  Crew* crew_;
  Nanos timeout_;
  Crew::Member member_ = 0;
  std::vector<double> rates_[4];  ///< by BenchCeiling
};

}  // namespace tensorbus::cli
