#pragma once

#include <iosfwd>
#include <string>

#include "tensorbus/cli/transfer.h"

namespace tensorbus::cli {

/// What `tensorbusctl plan` was asked; empty strings were not given.
struct PlanOptions {
  TransferOptions transfer;
  std::string ops;      ///< file to write, one op a line
  std::string explain;  ///< tensor to say more about
  std::string costs;    ///< JSON file of transports' costs
  std::string html;     ///< page to write
  std::string relays = "off";
  bool json = false;
};

/// Plans, checks, reports. JSON goes to `out`, what is for people to `err`. Returns an exit code.
int RunPlan(const PlanOptions& options, std::ostream& out, std::ostream& err);

}  // namespace tensorbus::cli
