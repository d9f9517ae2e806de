#pragma once

#include <cstdint>
#include <vector>

#include "planner/class_plan.h"
#include "planner/topology.h"

namespace tensorbus::planner {

/// Who sends what, before routes are known. A box number below `cuts_begin` is the match's; from
/// there on it counts `cuts`, which may repeat each other.
struct ChosenTransfers {
  std::vector<std::vector<Transfer>> by_class;  ///< in no particular order
  std::uint32_t cuts_begin = 0;
  std::vector<Box> cuts;

  /// The number of the part [lo, hi) of a box along a dimension.
  std::uint32_t Cut(const Box& box, int dim, std::uint64_t lo, std::uint64_t hi);
};

/// Chooses holders, none of them lost, for whatever ranks need that are not lost, and cuts where
/// balance wants it. Errors: kNoHolder for what only lost ranks held, kInvalidArgument for a lost
/// rank that is not there, kResourceExhausted as BuildPlan().
Result<ChosenTransfers> ChooseHolders(const LayoutMatch& match, const TopologyIndex& places,
                                      const RankSelection& lost, PlanFault* fault);

/// The same with relays: every byte leaves the sources once. `match` must be one made for relays.
Result<ChosenTransfers> ChooseRelays(const LayoutMatch& match, const TopologyIndex& places,
                                     const RankSelection& lost, PlanFault* fault);

}  // namespace tensorbus::planner
