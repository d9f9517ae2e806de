#pragma once

#include <cstdint>

#include "planner/plan.h"
#include "tensorbus/types/piece.h"

namespace tensorbus::planner {

/// What checking a plan established.
struct Certificate {
  std::uint64_t bytes = 0;     ///< bytes of all targets proven, received and local
  std::uint64_t op_count = 0;  ///< ops checked
};

/// Checks that every byte of every target box is written exactly once, in bounds, from a source
/// rank that holds it or from a target rank that received all of it in lower rounds. Shares no code
/// with BuildPlan(). The error names the first fault: tensor, ranks, box.
/// Ranks that are `lost` must have no part in it and get nothing.
Result<Certificate> CheckPlan(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& plan,
                              const RankSelection& lost = {});

/// The same for what concerns some ranks (PlanForRanks()): all that is written to their targets,
/// and that whatever they send lies in one box that they hold and in one that the receiver asked
/// for. That every byte of a plan is right follows when all ranks' parts are: what a sender cannot
/// see, such as that an op is missing, the receiver does.
Result<Certificate> CheckPart(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& part,
                              const RankSelection& ranks);

/// Checks one rank's memory against its layout: every box of `layout` has at least one piece, every
/// piece is in bounds of its segment and, for a target, no byte of memory belongs to two different
/// elements.
Status CheckBuffers(const RankLayout& layout, const Registration& registration, std::uint32_t rank,
                    bool is_target);

}  // namespace tensorbus::planner
