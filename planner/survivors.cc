#include "planner/survivors.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>

namespace tensorbus::planner {
namespace {

Status CheckLost(std::string_view side, const std::vector<std::uint32_t>& ranks,
                 std::uint32_t count) {
  if (ranks.empty() || ranks.back() < count) return {};
  return {Code::kInvalidArgument,
          fmt::format("lost {} rank {}, the job has {} ranks", side, ranks.back(), count),
          Reason::kMalformed};
}

}  // namespace

Result<Survivors> Survivors::Create(const LayoutMatch& match, const RankSelection& lost) {
  TB_RETURN_IF_ERROR(CheckLost("source", lost.sources, match.source->rank_count));
  TB_RETURN_IF_ERROR(CheckLost("target", lost.targets, match.target->rank_count));
  return Survivors(match, lost);
}

const std::vector<std::uint32_t>& Survivors::Left(std::uint32_t set,
                                                  const std::vector<std::uint32_t>& lost,
                                                  ByList* known) const {
  const std::vector<std::uint32_t>& all = match_->rank_sets[set];
  if (lost.empty()) return all;
  if (known->empty()) known->resize(match_->rank_sets.size());
  auto& left = (*known)[set];
  if (!left) {
    left.emplace();
    std::set_difference(all.begin(), all.end(), lost.begin(), lost.end(),
                        std::back_inserter(*left));
  }
  return *left;
}

Status OnlyLostHold(const LayoutMatch& match, const TensorClass& tensor_class, const Cell& cell,
                    std::uint32_t target, PlanFault* fault) {
  const std::string& name = match.target->tensors[tensor_class.tensors.front()].spec.name;
  const Box& box = match.boxes[cell.box];
  if (fault != nullptr) {
    *fault = {};
    fault->tensor = name;
    fault->rank = target;
    fault->box = box;
  }
  return {Code::kFailedPrecondition,
          fmt::format("tensor '{}': target rank {} needs box {}, which only lost source ranks "
                      "held: {}",
                      name, target, box.ToString(), fmt::join(match.rank_sets[cell.holders], ", ")),
          Reason::kNoHolder};
}

}  // namespace tensorbus::planner
