#include <algorithm>
#include <fmt/format.h>
#include <map>

#include "planner/class_plan.h"
#include "planner/regions.h"
#include "planner/topology.h"

namespace tensorbus::planner {
namespace {

/// What is left of `whole` without `parts`: the first such box, if any.
std::optional<Box> FirstUncovered(const Box& whole, std::span<const Box> parts) {
  std::vector<Box> left = {whole};
  for (const Box& part : parts) {
    std::vector<Box> next;
    for (const Box& box : left) {
      const auto common = Intersect(box, part);
      if (!common) {
        next.push_back(box);
        continue;
      }
      Box core = box;  // cut off what lies before and after `common`, dimension by dimension
      for (int d = 0; d < box.rank(); ++d) {
        Box before = core;
        Box after = core;
        before[d].hi = core[d].lo = (*common)[d].lo;
        after[d].lo = core[d].hi = (*common)[d].hi;
        if (!before.empty()) next.push_back(before);
        if (!after.empty()) next.push_back(after);
      }
    }
    left = std::move(next);
    if (left.empty()) return std::nullopt;
  }
  return *std::min_element(left.begin(), left.end());
}

Status NoHolder(const Holding& source, const Region& needed, std::span<const Box> held,
                PlanFault* fault) {
  const Box missing = FirstUncovered(needed.box, held).value_or(needed.box);
  PlanFault details;
  details.rank = needed.ranks.front();
  details.box = missing;
  for (const RankBoxes& ranks : source.ranks) details.near_ranks.push_back(ranks.rank);
  const std::string who =
      details.near_ranks.empty()
          ? "no source rank holds any of it"
          : fmt::format("source ranks that hold other parts: {}",
                        fmt::join(std::span(details.near_ranks)
                                      .first(std::min<std::size_t>(details.near_ranks.size(), 8)),
                                  ", "));
  if (fault != nullptr) *fault = std::move(details);
  return {Code::kFailedPrecondition,
          fmt::format("target rank {} needs box {}, which no source rank holds; {}",
                      needed.ranks.front(), missing.ToString(), who),
          Reason::kNoHolder};
}

}  // namespace

Result<std::vector<Cell>> CellsOf(const Holding& source, const Holding& target, PlanFault* fault) {
  TB_ASSIGN_OR_RETURN(const std::vector<Region> regions, RegionsOf(source));
  const RegionIndex index(regions);
  std::vector<Cell> cells;
  for (const Region& needed : DistinctBoxes(target)) {
    const std::size_t first_cell = cells.size();
    std::uint64_t volume = 0;
    const auto [first, last] = index.Candidates(needed.box);
    for (std::size_t r = first; r < last; ++r) {
      const auto common = Intersect(regions[r].box, needed.box);
      if (!common) continue;
      volume += common->volume();
      cells.push_back({*common, regions[r].ranks, needed.ranks});
    }
    if (volume == needed.box.volume()) continue;
    std::vector<Box> held;
    for (std::size_t c = first_cell; c < cells.size(); ++c) held.push_back(cells[c].box);
    return NoHolder(source, needed, held, fault);
  }
  return cells;
}

Result<std::vector<Supply>> SuppliesOf(const JobLayout& source, const JobLayout& target,
                                       const Topology& topology) {
  TB_ASSIGN_OR_RETURN(const TopologyIndex places,
                      TopologyIndex::Create(topology, source.rank_count, target.rank_count));
  TB_ASSIGN_OR_RETURN(const std::vector<TensorClass> classes, Classify(source, target, nullptr));
  std::map<std::vector<std::uint32_t>, std::uint64_t> bytes;
  for (const TensorClass& c : classes) {
    TB_ASSIGN_OR_RETURN(
        const std::vector<Cell> cells,
        CellsOf(source.holdings[c.source_holding], target.holdings[c.target_holding], nullptr));
    for (const Cell& cell : cells) {
      std::uint64_t remote = cell.targets.size();
      if (!places.trivial()) {
        for (const std::uint32_t t : cell.targets)
          remote -= places.LocalHolder(cell.holders, t) ? 1 : 0;
      }
      if (remote == 0) continue;
      bytes[cell.holders] += cell.box.volume() * ItemBytes(c.dtype) * c.tensors.size() * remote;
    }
  }
  std::vector<Supply> supplies;
  for (auto& [holders, sum] : bytes) supplies.push_back({holders, sum});
  return supplies;
}

}  // namespace tensorbus::planner
