#include <algorithm>
#include <map>

#include "planner/balance.h"
#include "planner/class_plan.h"
#include "planner/survivors.h"
#include "planner/topology.h"

namespace tensorbus::planner {
namespace {

using Ranks = std::vector<std::uint32_t>;

/// Bytes by the ranks of which any may move them.
using Loads = std::map<Ranks, std::uint64_t>;

std::uint64_t BusiestOf(const Loads& loads, std::uint32_t rank_count) {
  std::vector<Supply> supplies;
  for (const auto& [ranks, bytes] : loads) supplies.push_back({ranks, bytes});
  return MinMaxSend(supplies, rank_count);
}

class PortBound {
 public:
  PortBound(const LayoutMatch& match, const TopologyIndex& places, Survivors survivors, bool relays)
      : match_(match), places_(places), survivors_(std::move(survivors)), relays_(relays) {}

  std::uint64_t Run() && {
    // Cells with the same holders and targets count together.
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> cells;
    for (std::size_t c = 0; c < match_.classes.size(); ++c) {
      const TensorClass& tensor_class = match_.classes[c];
      const std::uint64_t scale = ItemBytes(tensor_class.dtype) * tensor_class.tensors.size();
      for (const Cell& cell : match_.cells[c])
        cells[{cell.holders, cell.targets}] += match_.boxes[cell.box].volume() * scale;
    }
    for (const auto& [sets, bytes] : cells)
      Add(survivors_.SourcesOf(sets.first), survivors_.TargetsOf(sets.second), bytes);
    return std::max({BusiestOf(out_of_sources_, match_.source->rank_count),
                     BusiestOf(out_of_targets_, match_.target->rank_count),
                     BusiestOf(in_, match_.target->rank_count)});
  }

 private:
  void Add(const Ranks& holders, const Ranks& targets, std::uint64_t bytes) {
    std::map<std::uint32_t, Ranks> by_node;  // targets whose node does not hold the bytes
    Ranks near;                              // those who receive them from a source on their node
    for (const std::uint32_t target : targets) {
      if (places_.LocalHolder(holders, target)) continue;
      if (places_.OnNode(holders, target).empty()) {
        by_node[places_.NodeOf(target)].push_back(target);
      } else {
        near.push_back(target);
      }
    }
    if (by_node.empty()) return;
    for (const auto& [node, ranks] : by_node) {
      if (relays_) {
        in_[ranks] += bytes;
        continue;
      }
      for (const std::uint32_t target : ranks) in_[{target}] += bytes;
      out_of_sources_[holders] += bytes * ranks.size();
    }
    if (!relays_) return;
    if (near.empty()) {
      out_of_sources_[holders] += bytes;
    } else {
      out_of_targets_[near] += bytes;
    }
  }

  const LayoutMatch& match_;
  const TopologyIndex& places_;
  Survivors survivors_;
  bool relays_;
  Loads out_of_sources_;
  Loads out_of_targets_;
  Loads in_;  // by targets
};

}  // namespace

Result<std::uint64_t> LeastPortBytes(const JobLayout& source, const JobLayout& target,
                                     const Topology& topology, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(const TopologyIndex places,
                      TopologyIndex::Create(topology, source.rank_count, target.rank_count));
  TB_ASSIGN_OR_RETURN(const LayoutMatch match, MatchLayouts(source, target, options, nullptr));
  TB_ASSIGN_OR_RETURN(Survivors survivors, Survivors::Create(match, options.lost));
  return PortBound(match, places, std::move(survivors), options.relays).Run();
}

}  // namespace tensorbus::planner
