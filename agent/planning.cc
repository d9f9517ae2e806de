#include "agent/planning.h"

#include <algorithm>
#include <fmt/format.h>

#include "planner/certificate.h"
#include "tensorbus/base/clock.h"

namespace tensorbus::agent {

Hash128 HashOf(const planner::Topology& topology) {
  Hasher hasher;
  const auto add = [&hasher](const std::vector<std::uint32_t>& ranks) {
    hasher.AddU64(ranks.size());
    for (const std::uint32_t rank : ranks) hasher.AddU32(rank);
  };
  hasher.AddU64(topology.nodes.size());
  for (const planner::Topology::Node& node : topology.nodes) {
    add(node.source);
    add(node.target);
  }
  return hasher.Finish();
}

Result<std::shared_ptr<const PreparedPlan>> MakePlan(std::shared_ptr<const JobLayout> source,
                                                     std::shared_ptr<const JobLayout> target,
                                                     const planner::Topology& topology) {
  const TimePoint begin = Clock::Real().Now();
  auto prepared = std::make_shared<PreparedPlan>();
  TB_ASSIGN_OR_RETURN(const planner::LayoutMatch match,
                      planner::MatchLayouts(*source, *target, {}, nullptr));
  TB_ASSIGN_OR_RETURN(prepared->classes, planner::BuildClassPlan(match, topology));
  prepared->topology = topology;
  prepared->source = std::move(source);
  prepared->target = std::move(target);
  prepared->plan_seconds = Seconds(Clock::Real().Now() - begin);
  return std::shared_ptr<const PreparedPlan>(std::move(prepared));
}

Result<planner::Plan> OwnPart(const PreparedPlan& plan, planner::RankSelection ranks) {
  std::sort(ranks.sources.begin(), ranks.sources.end());
  std::sort(ranks.targets.begin(), ranks.targets.end());
  planner::Plan part = planner::PlanForRanks(plan.classes, ranks);
  TB_RETURN_IF_ERROR(
      planner::CheckPart(*plan.source, *plan.target, plan.topology, part, ranks).status());
  return part;
}

Result<std::shared_ptr<const JobLayout>> ParseLayout(std::span<const std::byte> bytes,
                                                     const Hash128& expected) {
  TB_ASSIGN_OR_RETURN(JobLayout layout, ParseJobLayout(bytes));
  const Hash128 actual = tensorbus::HashOf(layout);
  if (actual != expected) {
    return Status(Code::kDataLoss,
                  fmt::format("layout {} arrived as {}", expected.ToHex(), actual.ToHex()),
                  Reason::kPlanMismatch);
  }
  return std::make_shared<const JobLayout>(std::move(layout));
}

}  // namespace tensorbus::agent
