#pragma once

#include <iosfwd>
#include <string>

namespace tensorbus::cli {

/// What `tensorbusctl plan` was asked; empty strings were not given.
struct PlanOptions {
  std::string source;    ///< layout file
  std::string target;    ///< layout file
  std::string layouts;   ///< layouts file; manifests lie beside it
  std::string scenario;  ///< id, unique prefix of one, or "all"
  std::string topology;  ///< JSON file
  std::string ops;       ///< file to write, one op a line
  std::string explain;   ///< tensor to say more about
  std::string costs;     ///< JSON file of transports' costs
  std::string relays = "off";
  bool json = false;
};

/// Plans, checks, reports. JSON goes to `out`, what is for people to `err`. Returns an exit code.
int RunPlan(const PlanOptions& options, std::ostream& out, std::ostream& err);

}  // namespace tensorbus::cli
