#include "planner/plan.h"

#include <algorithm>
#include <tuple>

#include "planner/class_plan.h"

namespace tensorbus::planner {

Result<Plan> BuildPlan(const JobLayout& source, const JobLayout& target, const Topology& topology,
                       PlanFault* fault, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(const LayoutMatch match, MatchLayouts(source, target, options, fault));
  TB_ASSIGN_OR_RETURN(const ClassPlan classes, BuildClassPlan(match, topology, fault, options));
  return WriteOut(classes);
}

OpRange RouteOps(const Plan& plan, std::uint32_t source, std::uint32_t target) {
  using Key = std::tuple<std::uint32_t, bool, std::uint32_t>;
  const auto key_of = [](const Route& route) {
    return Key(route.target, route.relayed, route.source);
  };
  const Key key(target, false, source);
  const auto found =
      std::lower_bound(plan.routes.begin(), plan.routes.end(), key,
                       [&](const Route& route, const Key& k) { return key_of(route) < k; });
  const bool there = found != plan.routes.end() && key_of(*found) == key;
  return there ? OpsOf(plan, *found) : OpRange();
}

}  // namespace tensorbus::planner
