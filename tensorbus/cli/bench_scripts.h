#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tensorbus/cli/bench_crew.h"
#include "tensorbus/cli/bench_workload.h"

namespace tensorbus::cli {

/// A peer that is a Python program: how each of its processes is started.
struct ScriptPeer {
  std::vector<std::string> argv;    ///< without the number of the process
  std::uint32_t process_count = 0;  ///< source ranks, then target ranks
};

/// Finds the script and a Python that has what it needs, and writes what it reads.
///
/// The script is bench/peers/torch_peer.py in the source tree, share/tensorbus/bench when
/// installed. Python is $TENSORBUS_PYTHON, else the one beside this program or in a .venv above
/// it, else python3; whether it has what it needs is asked of it, within `timeout`. Errors:
/// kUnavailable saying what is missing; kCancelled.
Result<ScriptPeer> PrepareScriptPeer(Crew& crew, const std::string& kind, const Workload& workload,
                                     Nanos timeout);

}  // namespace tensorbus::cli
