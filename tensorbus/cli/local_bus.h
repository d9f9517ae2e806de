#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include "tensorbus/base/status.h"

// A daemon and an agent for this host, in the background.
namespace tensorbus::cli {

struct LocalOptions {
  std::string runtime_dir;
  std::string bin_dir;  ///< where tensorbusd and tensorbus-agent are
  std::string log_level = "info";
  std::vector<std::string> agent_arguments;  ///< passed on to tensorbus-agent
  double timeout_seconds = 5;
  bool json = false;
};

/// Starts what does not run yet and waits until both answer. Again: says that they run.
int RunUp(const LocalOptions& options, std::ostream& out, std::ostream& err);
/// Stops exactly the processes that `up` started, and removes their sockets. Nothing there: fine.
int RunDown(const LocalOptions& options, std::ostream& out, std::ostream& err);

/// A process by what cannot be taken over by another one with the same number.
struct ProcessMark {
  pid_t pid = 0;
  std::uint64_t start_ticks = 0;  ///< since boot, from /proc/PID/stat
};
/// The mark of a running process; none when it is gone or a zombie.
std::optional<ProcessMark> MarkOf(pid_t pid);
/// What a pid file says, if that very process still runs.
std::optional<ProcessMark> ReadPidFile(const std::string& path);

}  // namespace tensorbus::cli
