#include "planner/rounds.h"

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_map>

namespace tensorbus::planner {
namespace {

constexpr std::uint64_t kDenseMax = std::uint64_t{1} << 26;  ///< entries of a full table
constexpr std::uint32_t kFree = std::numeric_limits<std::uint32_t>::max();

/// Edge colouring of a bipartite graph with as many colours as its largest degree: an edge whose
/// ends have no free colour in common gets one by swapping two colours along the path that starts
/// at one end (König).
class Colouring {
 public:
  explicit Colouring(std::span<const Traffic> traffic) {
    std::map<std::uint32_t, std::uint32_t> sources;
    std::map<std::uint32_t, std::uint32_t> targets;
    for (const Traffic& t : traffic) {
      sources.emplace(t.source, 0);
      targets.emplace(t.target, 0);
    }
    std::uint32_t next = 0;
    for (auto& [rank, node] : sources) node = next++;
    for (auto& [rank, node] : targets) node = next++;
    std::vector<std::uint32_t> degrees(next);
    for (const Traffic& t : traffic) {
      ends_.push_back({sources[t.source], targets[t.target]});
      ++degrees[ends_.back().source];
      ++degrees[ends_.back().target];
    }
    for (const std::uint32_t degree : degrees) colours_ = std::max(colours_, degree);
    if (std::uint64_t{next} * colours_ <= kDenseMax)
      table_.assign(std::size_t{next} * colours_, kFree);
    colour_.assign(traffic.size(), kFree);
    lowest_.assign(next, 0);
  }

  void Place(std::uint32_t edge) {
    const Ends& ends = ends_[edge];
    const std::uint32_t common = FirstCommon(ends);
    if (common != kFree) return Set(edge, common);
    const std::uint32_t at_source = LastFree(ends.source);
    const std::uint32_t at_target = LastFree(ends.target);
    Swap(ends.target, at_source, at_target);
    Set(edge, at_source);
  }

  std::vector<std::uint32_t> Take() && { return std::move(colour_); }

 private:
  struct Ends {
    std::uint32_t source;
    std::uint32_t target;
  };

  std::uint32_t Slot(std::uint32_t node, std::uint32_t colour) const {
    const std::uint64_t at = std::uint64_t{node} * colours_ + colour;
    if (!table_.empty()) return table_[static_cast<std::size_t>(at)];
    const auto found = sparse_.find(at);
    return found == sparse_.end() ? kFree : found->second;
  }
  void SetSlot(std::uint32_t node, std::uint32_t colour, std::uint32_t edge) {
    const std::uint64_t at = std::uint64_t{node} * colours_ + colour;
    if (!table_.empty()) {
      table_[static_cast<std::size_t>(at)] = edge;
    } else {
      sparse_[at] = edge;
    }
  }
  void Set(std::uint32_t edge, std::uint32_t colour) {
    colour_[edge] = colour;
    SetSlot(ends_[edge].source, colour, edge);
    SetSlot(ends_[edge].target, colour, edge);
  }
  /// The last, so that swaps leave the first rounds alone, where like is with like.
  std::uint32_t LastFree(std::uint32_t node) const {
    std::uint32_t colour = colours_ - 1;
    while (Slot(node, colour) != kFree) --colour;
    return colour;
  }
  std::uint32_t FirstCommon(const Ends& ends) {
    for (const std::uint32_t node : {ends.source, ends.target}) {
      while (lowest_[node] < colours_ && Slot(node, lowest_[node]) != kFree) ++lowest_[node];
    }
    for (std::uint32_t c = std::max(lowest_[ends.source], lowest_[ends.target]); c < colours_;
         ++c) {
      if (Slot(ends.source, c) == kFree && Slot(ends.target, c) == kFree) return c;
    }
    return kFree;
  }
  /// Frees `wanted` at `node` by swapping it with `other` along the path of these two colours.
  void Swap(std::uint32_t node, std::uint32_t wanted, std::uint32_t other) {
    std::vector<std::uint32_t> path;
    std::uint32_t colour = wanted;
    for (std::uint32_t at = node; Slot(at, colour) != kFree;) {
      const std::uint32_t edge = Slot(at, colour);
      path.push_back(edge);
      at = ends_[edge].source == at ? ends_[edge].target : ends_[edge].source;
      colour = colour == wanted ? other : wanted;
    }
    for (const std::uint32_t edge : path) {
      SetSlot(ends_[edge].source, colour_[edge], kFree);
      SetSlot(ends_[edge].target, colour_[edge], kFree);
    }
    for (const std::uint32_t edge : path) Set(edge, colour_[edge] == wanted ? other : wanted);
    for (const std::uint32_t edge : path) {
      lowest_[ends_[edge].source] = 0;
      lowest_[ends_[edge].target] = 0;
    }
  }

  std::uint32_t colours_ = 0;
  std::vector<Ends> ends_;
  std::vector<std::uint32_t> table_;  // node and colour -> edge; empty when too large
  std::unordered_map<std::uint64_t, std::uint32_t> sparse_;  // the same, only looked up
  std::vector<std::uint32_t> colour_;                        // by edge
  std::vector<std::uint32_t> lowest_;  // node -> no free colour below this one
};

}  // namespace

std::vector<std::uint32_t> AssignRounds(std::span<const Traffic> traffic) {
  std::vector<std::uint32_t> order(traffic.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  // Equal loads go diagonal by diagonal, so that the first rounds already keep everybody busy.
  const auto diagonal = [&](std::uint32_t i) { return traffic[i].target - traffic[i].source; };
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (traffic[a].bytes != traffic[b].bytes) return traffic[a].bytes > traffic[b].bytes;
    return diagonal(a) < diagonal(b);
  });
  Colouring colouring(traffic);
  for (const std::uint32_t edge : order) colouring.Place(edge);
  return std::move(colouring).Take();
}

}  // namespace tensorbus::planner
