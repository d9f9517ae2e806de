#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/class_plan.h"

namespace tensorbus::planner {

/// Who is left of a match's sets of ranks when some ranks are lost. Borrows both. Confined.
class Survivors {
 public:
  /// Error: kInvalidArgument for a lost rank that is not there.
  static Result<Survivors> Create(const LayoutMatch& match, const RankSelection& lost);

  /// Of a set of source ranks, those that are left.
  const std::vector<std::uint32_t>& SourcesOf(std::uint32_t set) {
    return Left(set, lost_->sources, &sources_);
  }
  /// Of a set of target ranks, those that are left.
  const std::vector<std::uint32_t>& TargetsOf(std::uint32_t set) {
    return Left(set, lost_->targets, &targets_);
  }
  /// Ascending.
  const std::vector<std::uint32_t>& lost_targets() const { return lost_->targets; }

 private:
  using ByList = std::vector<std::optional<std::vector<std::uint32_t>>>;  // by set, once asked for

  Survivors(const LayoutMatch& match, const RankSelection& lost) : match_(&match), lost_(&lost) {}
  const std::vector<std::uint32_t>& Left(std::uint32_t set, const std::vector<std::uint32_t>& lost,
                                         ByList* known) const;

  const LayoutMatch* match_;
  const RankSelection* lost_;
  ByList sources_;
  ByList targets_;
};

/// kNoHolder: all sources that hold what `target` needs are lost.
Status OnlyLostHold(const LayoutMatch& match, const TensorClass& tensor_class, const Cell& cell,
                    std::uint32_t target, PlanFault* fault);

}  // namespace tensorbus::planner
