#include "planner/order_balance.h"

#include <algorithm>

namespace tensorbus::planner {
namespace {

/// A node that one of the orders spares.
struct Candidate {
  std::uint64_t level = 0;  ///< what each of its ranks sends already
  std::uint64_t ranks = 0;

  /// Bytes of `bytes` that must be spared to this node, so that its ranks stay at `limit`.
  std::uint64_t SparedAt(std::uint64_t limit, std::uint64_t bytes) const {
    if (limit <= level) return bytes;
    const std::uint64_t room = limit - level;
    return room > bytes / ranks ? 0 : bytes - room * ranks;
  }
};

/// Whether orders that carry `bytes` together can keep all at `limit`.
bool Fits(const std::vector<Candidate>& candidates, std::uint64_t limit, std::uint64_t bytes) {
  std::uint64_t left = bytes;
  for (const Candidate& candidate : candidates) {
    const std::uint64_t spared = candidate.SparedAt(limit, bytes);
    if (spared > left) return false;
    left -= spared;
  }
  return true;
}

}  // namespace

void OrderBalance::CountRoot(const RelayTrees& trees, std::uint64_t bytes) {
  if (trees.root_first() && trees.nodes().size() > 1) Count(trees.nodes()[0], bytes);
}

std::vector<std::uint64_t> OrderBalance::Share(const RelayTrees& trees, std::uint64_t bytes) {
  const std::size_t orders = trees.orders();
  if (orders == 1) return {bytes};
  std::vector<Candidate> candidates;
  for (std::size_t order = 0; order < orders; ++order) {
    const auto& node = trees.nodes()[trees.LastNode(order)];
    candidates.push_back({LevelOf(node), node.size()});
  }
  // The lowest limit that all can be kept at: at `high` nobody need be spared.
  std::uint64_t low = 0;
  std::uint64_t high = bytes + 1;
  for (const Candidate& candidate : candidates) high = std::max(high, candidate.level + bytes + 1);
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (Fits(candidates, middle, bytes)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  std::vector<std::uint64_t> shares;
  std::uint64_t left = bytes;
  for (const Candidate& candidate : candidates) {
    shares.push_back(candidate.SparedAt(low, bytes));
    left -= shares.back();
  }
  for (std::size_t order = 0; order < orders; ++order) {
    shares[order] += left / orders + (order < left % orders ? 1 : 0);
    Count(trees.nodes()[trees.LastNode(order)], bytes - shares[order]);
  }
  return shares;
}

std::uint64_t OrderBalance::LevelOf(const std::vector<std::uint32_t>& node) const {
  std::uint64_t mean = 0;
  for (const std::uint32_t rank : node) mean += sent_[rank] / node.size();
  return mean;
}

void OrderBalance::Count(const std::vector<std::uint32_t>& node, std::uint64_t bytes) {
  for (const std::uint32_t rank : node) sent_[rank] += bytes / node.size();
}

}  // namespace tensorbus::planner
