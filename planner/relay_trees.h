#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tensorbus::planner {

/// One copy of a tree: how `target` gets what the tree carries.
struct RelayStep {
  std::uint32_t target = 0;
  std::uint32_t sender = 0;  ///< target rank that passes it on; at hop 0 a source does
  std::uint32_t hop = 0;     ///< how often the bytes were passed on before
};

/// The trees along which the targets that need the same bytes get them: from a source to one rank
/// of one node, from there to one rank of the next node and so on, and inside each node along a
/// chain of its ranks. So each byte leaves the sources once and enters each node once.
///
/// There is one tree for every order of the nodes (rotations) and every rank of a node to begin
/// with (rotations too). When the trees of one order carry as much each, a rank sends on no more
/// than it receives: of the k bytes that k ranks of a node receive, k - 1 are passed on inside and
/// at most one leaves. And every rank receives as much of each hop, so that hops can follow one
/// another in rounds and no link idles. What a node sends to other nodes depends on the order: the
/// last one sends nothing there.
///
/// Targets that are lost are left out of the trees that there would be with them, and some ranks
/// then send on a little more than they receive. Trees made for those that are left would be many
/// more: with seven ranks on one node and eight on others, 56 starts instead of 8. Immutable.
class RelayTrees {
 public:
  /// `nodes`: the targets by node, none empty. When `root_first`, the first node has the bytes of
  /// its own sources and always comes first. `lost`, ascending, are left out; they are never all of
  /// a node.
  RelayTrees(std::vector<std::vector<std::uint32_t>> nodes, bool root_first,
             std::span<const std::uint32_t> lost = {});

  std::size_t count() const { return node_orders_ * starts_; }
  /// Trees [order * starts(), (order + 1) * starts()) go through the nodes in one order.
  std::size_t orders() const { return node_orders_; }
  std::size_t starts() const { return starts_; }
  std::span<const std::vector<std::uint32_t>> nodes() const { return nodes_; }
  bool root_first() const { return root_first_; }
  /// The node, as an index into nodes(), that comes last in an order.
  std::size_t LastNode(std::size_t order) const;

  /// The copies of one tree, every target's once, after that of its sender.
  std::vector<RelayStep> Steps(std::size_t tree) const;

 private:
  std::vector<std::vector<std::uint32_t>> nodes_;
  bool root_first_;
  std::size_t node_orders_ = 1;
  std::size_t starts_ = 1;  // ranks to begin with in a node: a multiple of every node's, if small
};

}  // namespace tensorbus::planner
