#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "planner/plan.h"

namespace tensorbus::planner {

/// A topology turned round for look-up by target rank. Immutable.
class TopologyIndex {
 public:
  /// Errors: kInvalidArgument when a rank is out of range or on two nodes.
  static Result<TopologyIndex> Create(const Topology& topology, std::uint32_t source_count,
                                      std::uint32_t target_count);

  /// Source ranks on the target's device, ascending.
  std::span<const std::uint32_t> SameDevice(std::uint32_t target) const {
    return same_device_[target];
  }
  /// Whether no source shares a device or a node with a target.
  bool trivial() const { return trivial_; }
  /// The source among `holders` (ascending) from whose device the target copies, if any.
  std::optional<std::uint32_t> LocalHolder(std::span<const std::uint32_t> holders,
                                           std::uint32_t target) const;
  /// The target's node. Ranks that are on none have numbers of their own.
  std::uint32_t NodeOf(std::uint32_t target) const { return node_of_[target]; }
  /// Those of `holders` (ascending) that are on the target's node.
  std::vector<std::uint32_t> OnNode(std::span<const std::uint32_t> holders,
                                    std::uint32_t target) const;

 private:
  bool trivial_ = true;
  std::vector<std::vector<std::uint32_t>> same_device_;  // by target
  std::vector<std::vector<std::uint32_t>> near_;         // by node: its source ranks, ascending
  std::vector<std::uint32_t> node_of_;                   // by target
};

/// What holds without a topology file: every rank a device of its own, nodes of eight consecutive
/// targets. `colocated` puts source i and target i on one device, and so on one node.
Topology DefaultTopology(std::uint32_t source_count, std::uint32_t target_count, bool colocated);

}  // namespace tensorbus::planner
