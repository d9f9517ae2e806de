#pragma once

#include <cstdint>
#include <optional>
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

/// The failure of a block whose two sums differ; carries the block's index for MismatchedBlock().
Status BlockMismatch(const RouteKey& key, std::uint32_t block, const std::string& detail);
/// The same where nobody can say which of the route's blocks it is.
Status RouteMismatch(const RouteKey& key, const std::string& detail);
/// The block that a kChecksumMismatch of a transport is about; none for other failures, or if the
/// fault cannot be laid on one block.
std::optional<std::uint32_t> MismatchedBlock(const Status& status);

}  // namespace tensorbus::transport
