#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensorbus/base/status.h"

namespace tensorbus::planner {

/// Bytes that must be sent, each by any of some source ranks.
struct Supply {
  std::vector<std::uint32_t> holders;  ///< ascending, not empty
  std::uint64_t bytes = 0;
};

/// Largest sum of supplies that the functions here take.
inline constexpr std::uint64_t kMaxSupplyBytes = std::uint64_t{1} << 62;

/// The bytes of `count` boxes of this size, which join the sum of supplies in `*total`. Error:
/// kResourceExhausted, with nothing joined, where the sum would exceed kMaxSupplyBytes.
Result<std::uint64_t> JoinSupplies(std::uint64_t box_bytes, std::uint64_t count,
                                   std::uint64_t* total);

/// The least possible number of bytes that the busiest source sends when every supply may be split
/// freely among its holders, rounded up to a whole byte. Exact: found by min-cuts.
std::uint64_t MinMaxSend(std::span<const Supply> supplies, std::uint32_t source_count);

/// How many bytes of each supply each of its holders sends: result[i][k] belongs to
/// supplies[i].holders[k], and result[i] sums to supplies[i].bytes. The busiest source sends at
/// most 1/512 more than MinMaxSend(), and ranks that need not be busy share evenly. Integers only,
/// so every machine gets the same answer.
std::vector<std::vector<std::uint64_t>> Balance(std::span<const Supply> supplies,
                                                std::uint32_t source_count);

/// Shares as Balance() gives them.
struct NodeShares {
  std::vector<std::vector<std::uint64_t>> far;
  std::vector<std::vector<std::uint64_t>> near;
};

/// Balances what is sent to other nodes by itself, since ports between nodes are the slow ones;
/// then what stays on its node, so that the busiest source overall is as little busy as can be.
NodeShares BalanceByNode(std::span<const Supply> far, std::span<const Supply> near,
                         std::uint32_t source_count);

}  // namespace tensorbus::planner
