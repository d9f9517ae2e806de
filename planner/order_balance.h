#pragma once

#include <cstdint>
#include <vector>

#include "planner/relay_trees.h"

namespace tensorbus::planner {

/// Shares out what groups of targets get among the orders in which relays may go through their
/// nodes, so that no rank has to send much more to other nodes than the rest. All of an order's
/// nodes send on to the next but the last, so an order's share is what it spares that node.
/// Confined.
class OrderBalance {
 public:
  explicit OrderBalance(std::uint32_t target_count) : sent_(target_count) {}

  /// Counts what the first node sends on whatever the order, where it has the bytes' sources. Such
  /// groups are all counted before the first Share().
  void CountRoot(const RelayTrees& trees, std::uint64_t bytes);

  /// Bytes by order; they add up to `bytes`, which summed over all groups stay below 2^62.
  std::vector<std::uint64_t> Share(const RelayTrees& trees, std::uint64_t bytes);

 private:
  /// Mean of what a node's ranks send to other nodes.
  std::uint64_t LevelOf(const std::vector<std::uint32_t>& node) const;
  void Count(const std::vector<std::uint32_t>& node, std::uint64_t bytes);

  std::vector<std::uint64_t> sent_;  // to other nodes, by target rank
};

}  // namespace tensorbus::planner
