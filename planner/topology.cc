#include "planner/topology.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>

namespace tensorbus::planner {
namespace {

constexpr std::uint32_t kNoNode = std::numeric_limits<std::uint32_t>::max();

Status OutOfRange(std::string_view side, std::uint32_t rank, std::uint32_t count) {
  return {Code::kInvalidArgument,
          fmt::format("topology: {} rank {}, the job has {} ranks", side, rank, count),
          Reason::kMalformed};
}

/// Notes that `rank` is on `node`, once.
Status Place(std::string_view side, std::uint32_t rank, std::uint32_t node,
             std::vector<std::uint32_t>* nodes) {
  if (rank >= nodes->size())
    return OutOfRange(side, rank, static_cast<std::uint32_t>(nodes->size()));
  if ((*nodes)[rank] != kNoNode) {
    return {
        Code::kInvalidArgument,
        fmt::format("topology: {} rank {} is on nodes {} and {}", side, rank, (*nodes)[rank], node),
        Reason::kMalformed};
  }
  (*nodes)[rank] = node;
  return {};
}

}  // namespace

Result<TopologyIndex> TopologyIndex::Create(const Topology& topology, std::uint32_t source_count,
                                            std::uint32_t target_count) {
  TopologyIndex index;
  index.same_device_.resize(target_count);
  index.node_of_.assign(target_count, kNoNode);
  std::vector<std::uint32_t> source_nodes(source_count, kNoNode);
  for (std::uint32_t n = 0; n < topology.nodes.size(); ++n) {
    const Topology::Node& node = topology.nodes[n];
    for (const std::uint32_t rank : node.source)
      TB_RETURN_IF_ERROR(Place("source", rank, n, &source_nodes));
    for (const std::uint32_t rank : node.target)
      TB_RETURN_IF_ERROR(Place("target", rank, n, &index.node_of_));
    index.near_.push_back(node.source);
    std::sort(index.near_.back().begin(), index.near_.back().end());
    if (!node.source.empty() && !node.target.empty()) index.trivial_ = false;
  }
  index.near_.resize(topology.nodes.size() + target_count);
  for (std::uint32_t target = 0; target < target_count; ++target) {
    if (index.node_of_[target] == kNoNode)
      index.node_of_[target] = static_cast<std::uint32_t>(topology.nodes.size()) + target;
  }
  for (const auto& [source, target] : topology.same_device) {
    if (source >= source_count) return OutOfRange("source", source, source_count);
    if (target >= target_count) return OutOfRange("target", target, target_count);
    index.same_device_[target].push_back(source);
    index.trivial_ = false;
  }
  for (auto& sources : index.same_device_) {
    std::sort(sources.begin(), sources.end());
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  }
  return index;
}

std::optional<std::uint32_t> TopologyIndex::LocalHolder(std::span<const std::uint32_t> holders,
                                                        std::uint32_t target) const {
  for (const std::uint32_t source : same_device_[target]) {
    if (std::binary_search(holders.begin(), holders.end(), source)) return source;
  }
  return std::nullopt;
}

std::vector<std::uint32_t> TopologyIndex::OnNode(std::span<const std::uint32_t> holders,
                                                 std::uint32_t target) const {
  std::vector<std::uint32_t> near;
  const std::vector<std::uint32_t>& there = near_[node_of_[target]];
  std::set_intersection(holders.begin(), holders.end(), there.begin(), there.end(),
                        std::back_inserter(near));
  return near;
}

Topology DefaultTopology(std::uint32_t source_count, std::uint32_t target_count, bool colocated) {
  constexpr std::uint32_t kNodeRanks = 8;
  Topology topology;
  for (std::uint32_t target = 0; target < target_count; ++target) {
    if (target % kNodeRanks == 0) topology.nodes.emplace_back();
    topology.nodes.back().target.push_back(target);
    if (!colocated || target >= source_count) continue;
    topology.nodes.back().source.push_back(target);
    topology.same_device.emplace_back(target, target);
  }
  return topology;
}

}  // namespace tensorbus::planner
