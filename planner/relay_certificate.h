#pragma once

#include <cstdint>
#include <span>

#include "planner/plan.h"

namespace tensorbus::planner {

/// The part of CheckPlan() that is about relays: each of `ranks` that passes a box on has received
/// all of it, from other devices, in rounds before the one it sends in. As rounds only rise along
/// the way of a byte, nobody waits in a circle. What a device held from the start is never relayed:
/// its first hop is a source's.
///
/// Trusts what CheckPlan() proves before: ranks in range, routes that agree with their ops, and no
/// element of a target written twice.
Status CheckRelays(const JobLayout& target, const Plan& plan, std::span<const std::uint32_t> ranks);

}  // namespace tensorbus::planner
