#pragma once

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "planner/plan.h"

namespace tensorbus::planner {

/// A node per host, ordered by its name, whatever order the participants of a transfer come in.
/// Daemon and agents have to agree on it: it is a part of what a plan is made from.
///   participants  anything with `host`, `source_ranks` and `target_ranks`
template <typename Participants>
Topology TopologyByHost(const Participants& participants) {
  std::map<std::string_view, Topology::Node> by_host;
  for (const auto& participant : participants) {
    Topology::Node& node = by_host[participant.host];
    node.source.insert(node.source.end(), participant.source_ranks.begin(),
                       participant.source_ranks.end());
    node.target.insert(node.target.end(), participant.target_ranks.begin(),
                       participant.target_ranks.end());
  }
  Topology topology;
  for (auto& [host, node] : by_host) {
    std::sort(node.source.begin(), node.source.end());
    std::sort(node.target.begin(), node.target.end());
    topology.nodes.push_back(std::move(node));
  }
  return topology;
}

}  // namespace tensorbus::planner
