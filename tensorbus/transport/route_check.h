#pragma once

#include <cstdint>
#include <string>

#include "tensorbus/base/status.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// "session 7 route 3 -> 5": how messages name a route.
std::string RouteName(const RouteKey& key);

/// Identifies the cut of a route into blocks (count, extents, item sizes; no addresses), so that
/// two ends can compare it in eight bytes.
std::uint64_t ShapeOf(const RouteEnd& end);

/// Checks one end by itself: block indices of aliases, sizes of aliases and readback places. Error:
/// kInvalidArgument.
Status CheckEnd(const RouteEnd& end);

/// Whether two ends describe one stream. Error: kInvalidArgument/kPlanMismatch naming the first
/// difference.
Status CheckEndsMatch(const RouteKey& key, const RouteEnd& source, const RouteEnd& target);

/// What the caller of Pull() can check about a result without trusting the transport: a sum per
/// block, every byte counted, and (from kReadback on) both receipts equal. Error:
/// kDataLoss/kChecksumMismatch naming the block.
Status CheckResult(const RouteKey& key, const RouteEnd& target, const PullResult& result,
                   Proof proof);

/// The failure of a block whose two sums differ.
Status BlockMismatch(const RouteKey& key, std::uint32_t block, const std::string& detail);

}  // namespace tensorbus::transport
