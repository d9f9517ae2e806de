#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/balance.h"

namespace tensorbus::planner {

/// Sends supplies through their holders under one cap for all sources: a maximum flow from the
/// supplies over the holders, by Dinic's algorithm. Confined, deterministic.
class SupplyFlow {
 public:
  SupplyFlow(std::span<const Supply> supplies, std::uint32_t source_count);

  /// Whether all supplies fit when no source sends more than `cap`. Starts afresh each time.
  bool Fits(std::uint64_t cap);

  /// After Fits() answered true: bytes by supply and holder.
  std::vector<std::vector<std::uint64_t>> Shares() const;

  /// After Fits() answered false: supplies that only these sources hold and that exceed their caps.
  /// The least cap that would fit these alone, rounded up; always more than the one tried.
  std::uint64_t CapOfCut() const;

 private:
  struct Edge {
    std::uint32_t to;
    std::uint64_t room;
  };

  std::uint32_t SupplyNode(std::size_t i) const { return 2 + static_cast<std::uint32_t>(i); }
  std::uint32_t SourceNode(std::uint32_t rank) const {
    return 2 + static_cast<std::uint32_t>(supplies_.size()) + rank;
  }
  void AddEdge(std::uint32_t from, std::uint32_t to);
  void BuildLists();
  bool FindLevels();
  std::uint64_t Advance();

  std::span<const Supply> supplies_;
  std::uint32_t source_count_;
  std::uint64_t total_bytes_ = 0;
  std::vector<Edge> edges_;            // edge e and its reverse e ^ 1
  std::vector<std::uint32_t> tails_;   // edge -> node it leaves
  std::vector<std::uint32_t> first_;   // node -> its place in `lists_`
  std::vector<std::uint32_t> lists_;   // edge numbers, node by node
  std::vector<std::uint32_t> next_;    // node -> next entry of `lists_` to try
  std::vector<std::uint32_t> levels_;  // distance from the start, kFar when not reached
};

}  // namespace tensorbus::planner
