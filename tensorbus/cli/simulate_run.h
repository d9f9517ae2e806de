#pragma once

#include <iosfwd>
#include <string>

#include "tensorbus/cli/transfer.h"

namespace tensorbus::cli {

/// What `tensorbusctl simulate` was asked; empty strings were not given.
struct SimulateOptions {
  TransferOptions transfer;
  std::string cluster = "h100-8x400g";  ///< name of a shipped cluster, or a file
  std::string wire = "as-is";           ///< or "fp8-block"
  std::string sharing = "remaining";    ///< or "equal", "rounds"
  std::string relays = "off";           ///< or "on", "auto"
  std::string html;                     ///< page to write
  bool json = false;
};

/// Plans, runs the plan on the cluster in virtual time, reports. JSON goes to `out`, what is for
/// people to `err`. Returns an exit code.
int RunSimulate(const SimulateOptions& options, std::ostream& out, std::ostream& err);

}  // namespace tensorbus::cli
