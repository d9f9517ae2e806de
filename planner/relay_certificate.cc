#include "planner/relay_certificate.h"

#include <fmt/format.h>

namespace tensorbus::planner {
namespace {

/// How many elements of a box arrive in rounds below `round`.
std::uint64_t VolumeBefore(const Plan& plan, std::span<const Arrival> arrivals, const Box& box,
                           std::uint64_t round) {
  std::uint64_t volume = 0;
  for (const Arrival& arrival : arrivals) {
    if (!ArrivesBefore(plan.routes[arrival.route], round)) continue;
    if (const auto common = Intersect(plan.boxes[arrival.box], box)) volume += common->volume();
  }
  return volume;
}

}  // namespace

Status CheckPassedOn(const JobLayout& target, const Plan& plan, std::span<const Arrival> arrivals,
                     const Route& route, const RouteOp& op) {
  const Box& box = plan.boxes[op.box];
  if (VolumeBefore(plan, arrivals, box, route.round) == box.volume()) return {};
  const bool later = VolumeBefore(plan, arrivals, box, std::uint64_t{1} << 32) == box.volume();
  return {Code::kInternal,
          fmt::format("tensor '{}': target {} passes box {} on to target {} in round {}, {}",
                      target.tensors[op.tensor].spec.name, route.source, box.ToString(),
                      route.target, route.round,
                      later ? "before all of it has arrived" : "but never receives all of it"),
          Reason::kPlanMismatch};
}

}  // namespace tensorbus::planner
