#include "planner/relay_trees.h"

#include <algorithm>
#include <numeric>

namespace tensorbus::planner {
namespace {

/// Most ranks to begin with. Nodes whose sizes have a larger common multiple get nearly even turns.
constexpr std::size_t kStartsMax = 64;

}  // namespace

RelayTrees::RelayTrees(std::vector<std::vector<std::uint32_t>> nodes, bool root_first,
                       std::span<const std::uint32_t> lost)
    : nodes_(std::move(nodes)), root_first_(root_first) {
  node_orders_ = std::max<std::size_t>(1, nodes_.size() - (root_first_ ? 1 : 0));
  for (const auto& node : nodes_) {
    starts_ = std::lcm(starts_, node.size());
    if (starts_ <= kStartsMax) continue;
    starts_ = kStartsMax;
    break;
  }
  for (auto& node : nodes_) {
    std::erase_if(node, [&](std::uint32_t rank) {
      return std::binary_search(lost.begin(), lost.end(), rank);
    });
  }
}

std::size_t RelayTrees::LastNode(std::size_t order) const {
  return nodes_.size() - node_orders_ + (order + node_orders_ - 1) % node_orders_;
}

std::vector<RelayStep> RelayTrees::Steps(std::size_t tree) const {
  const std::size_t first_node = tree / starts_;
  const std::size_t start = tree % starts_;
  const std::size_t fixed = root_first_ ? 1 : 0;
  std::vector<RelayStep> steps;
  std::uint32_t head = 0;  // of the node before
  for (std::size_t place = 0; place < nodes_.size(); ++place) {
    const bool is_root = root_first_ && place == 0;
    const auto& node = nodes_[is_root ? 0 : fixed + (place - fixed + first_node) % node_orders_];
    // Where some ranks begin more often than others, these are others in each order.
    const std::size_t shift = starts_ % node.size() == 0 ? 0 : first_node;
    const std::size_t begin = (start * node.size() / starts_ + shift) % node.size();
    std::uint32_t sender = head;
    for (std::size_t i = 0; i < node.size(); ++i) {
      const std::uint32_t target = node[(begin + i) % node.size()];
      steps.push_back({target, sender, static_cast<std::uint32_t>(place + i)});
      sender = target;
    }
    head = node[begin];
  }
  return steps;
}

}  // namespace tensorbus::planner
