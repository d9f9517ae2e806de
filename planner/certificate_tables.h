#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "planner/plan.h"

namespace tensorbus::planner {

/// What the certificate knows of a plan's tables once they have passed; for certificate.cc.
struct CheckedTables {
  struct Match {
    std::uint32_t holding = 0;  ///< the source's
    std::uint32_t item_bytes = 0;
  };
  std::vector<std::uint64_t> volumes;  ///< by box
  std::vector<Match> matches;          ///< by target tensor
};

/// Checks whatever does not depend on what ranks hold: names, shapes and dtypes agree; boxes,
/// routes and ops are in range and in their fixed order; a route says what its ops do; no rank has
/// two things to do in a round.
Result<CheckedTables> CheckTables(const JobLayout& source, const JobLayout& target,
                                  const Topology& topology, const Plan& plan);

/// A fault of a plan: kInternal/kPlanMismatch.
Status CertificateFault(std::string message);
/// "route from source 0 to target 1"
std::string DescribeRoute(const Route& route);
/// "tensor 'a': op from source 0 to target 1, box [0:3]"; numbers may be out of range.
std::string DescribeOp(const JobLayout& target, const Plan& plan, const Route& route,
                       const RouteOp& op);

}  // namespace tensorbus::planner
