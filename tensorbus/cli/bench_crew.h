#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/base/unique_fd.h"
#include "tensorbus/cli/bench_protocol.h"

namespace tensorbus::cli {

/// A program to start.
struct CrewSpec {
  std::string name;                   ///< for people, and of its log file: "target 1"
  std::vector<std::string> argv;      ///< argv[0] is the program's path
  bool speaks = true;                 ///< on a bench channel, whose number is appended as `--fd N`
  std::vector<int> descriptors = {};  ///< that it inherits under the same numbers
  bool clean_environment = true;      ///< without the TENSORBUS_… of ours
};

/// The processes of one benchmark and their runtime folder. Whatever happens (a failure, SIGINT,
/// this process killed), they end with it, and only they.
///
/// SIGINT, SIGTERM and SIGHUP are blocked while a Crew exists and come back as kCancelled, with the
/// signal's number as native(), from whatever waits. Confined to the thread that made it; one at a
/// time.
class Crew {
 public:
  /// Index of a process.
  using Member = std::size_t;

  /// Errors: what making a folder below $TMPDIR (or /tmp) may fail with.
  static Result<Crew> Create();
  Crew(Crew&&) noexcept;
  Crew& operator=(Crew&&) = delete;
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew();

  const std::string& folder() const { return folder_; }

  Result<Member> Start(const CrewSpec& spec);
  /// Runs a program that ends by itself; one that does not in time, or when we are to stop, is
  /// killed. Its exit status, 128 and more if a signal ended it.
  ///
  /// Errors: kDeadlineExceeded; kCancelled.
  Result<int> RunToEnd(const CrewSpec& spec, Nanos timeout);
  Status Send(Member member, const BenchMessage& message);

  /// One reply of each of `members`, in their order.
  ///
  /// Errors: kUnavailable/kPeerLost naming a process that ended; a failure that one replied with,
  /// annotated with its name; kDeadlineExceeded naming who did not answer `what`; kCancelled.
  Result<std::vector<BenchReply>> Collect(std::span<const Member> members, TimePoint deadline,
                                          const std::string& what);
  /// Send() to all, then Collect().
  Result<std::vector<BenchReply>> Ask(std::span<const Member> members, const BenchMessage& message,
                                      TimePoint deadline, const std::string& what);
  /// Waits until `there()`, asking again and again. Errors as Collect().
  Status Await(const std::function<bool()>& there, TimePoint deadline, const std::string& what);

  /// Ends processes and waits for them: those that speak are told to quit, the others get SIGTERM,
  /// and what is left after some seconds SIGKILL. Idempotent.
  void Stop(std::span<const Member> members);
  void StopAll();

  /// Processor time used so far, 0 once it has ended; and the largest resident set.
  std::uint64_t CpuNs(Member member) const;
  std::uint64_t PeakRssBytes(Member member) const;
  pid_t pid(Member member) const { return processes_[member].pid; }
  const std::string& name(Member member) const { return processes_[member].name; }
  std::string LogPath(Member member) const;
  /// The last lines of every log that has any, for a failure.
  std::string LogTails() const;

 private:
  struct Process {
    std::string name;
    pid_t pid = -1;  ///< -1 once reaped
    UniqueFd pidfd;
    UniqueFd channel;
  };

  Crew() = default;
  /// The first process that has ended, reaped and described; OK when all run.
  Status CheckAlive();
  Status DescribeEnd(Process& process);
  /// Reaps those of `members` that end in time; with none given, waits for the end of anyone.
  void ReapWithin(std::span<const Member> members, Nanos timeout);
  Status ReadSignal();

  std::string folder_;
  UniqueFd signals_;
  bool masked_ = false;
  std::vector<Process> processes_;
};

}  // namespace tensorbus::cli
