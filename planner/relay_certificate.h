#pragma once

#include <compare>
#include <cstdint>
#include <span>

#include "planner/plan.h"

namespace tensorbus::planner {

/// What one op brings, for certificate.cc.
struct Arrival {
  std::uint32_t route = 0;  ///< index into Plan::routes
  std::uint32_t box = 0;    ///< index into Plan::boxes

  friend auto operator<=>(const Arrival&, const Arrival&) = default;
};

/// Whether what a route brings may be passed on in a round.
inline bool ArrivesBefore(const Route& route, std::uint64_t round) {
  return !route.local && route.round < round;
}

/// The part of CheckPlan() that is about relays: a target rank that passes a box of a tensor on has
/// received all of it, from other devices, in rounds before the one it sends in. As rounds only
/// rise along the way of a byte, nobody waits in a circle. What a device held from the start is
/// never relayed: its first hop is a source's.
///
/// `arrivals` are what the rank gets of the tensor, no element of it twice; `op` is one of `route`,
/// and the rank is its sender.
Status CheckPassedOn(const JobLayout& target, const Plan& plan, std::span<const Arrival> arrivals,
                     const Route& route, const RouteOp& op);

}  // namespace tensorbus::planner
