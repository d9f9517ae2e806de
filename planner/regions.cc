#include "planner/regions.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus::planner {
namespace {

/// Cuts space at faces of overlapping boxes until every cell lies inside all boxes it touches.
class Refiner {
  static constexpr std::size_t kMaxSize = std::size_t{1} << 24;

 public:
  explicit Refiner(std::span<const Region> boxes) : boxes_(boxes) {}

  Result<std::vector<Region>> Run() && {
    Box hull = boxes_[0].box;
    std::vector<std::uint32_t> touching;
    for (std::uint32_t i = 0; i < boxes_.size(); ++i) {
      touching.push_back(i);
      for (int d = 0; d < hull.rank(); ++d) {
        hull[d].lo = std::min(hull[d].lo, boxes_[i].box[d].lo);
        hull[d].hi = std::max(hull[d].hi, boxes_[i].box[d].hi);
      }
    }
    if (!Refine(hull, touching)) {
      return Status(Code::kResourceExhausted,
                    fmt::format("boxes overlap in more than {} different ways", kMaxRegions),
                    Reason::kUnsupported);
    }
    return std::move(regions_);
  }

 private:
  struct Cut {
    int dim = -1;
    std::uint64_t at = 0;
  };

  /// The median face strictly inside `cell`, of the dimension where fewest boxes straddle it.
  Cut ChooseCut(const Box& cell, std::span<const std::uint32_t> touching) const {
    Cut best;
    std::size_t best_straddle = 0;
    for (int d = 0; d < cell.rank(); ++d) {
      std::vector<std::uint64_t> faces;
      for (const std::uint32_t i : touching) {
        const Range& range = boxes_[i].box[d];
        if (range.lo > cell[d].lo) faces.push_back(range.lo);
        if (range.hi < cell[d].hi) faces.push_back(range.hi);
      }
      if (faces.empty()) continue;
      const auto middle = faces.begin() + static_cast<std::ptrdiff_t>(faces.size() / 2);
      std::nth_element(faces.begin(), middle, faces.end());
      std::size_t straddle = 0;
      for (const std::uint32_t i : touching) {
        const Range& range = boxes_[i].box[d];
        straddle += range.lo < *middle && *middle < range.hi ? 1 : 0;
      }
      if (best.dim < 0 || straddle < best_straddle) {
        best = {d, *middle};
        best_straddle = straddle;
      }
    }
    return best;
  }

  bool Refine(const Box& cell, std::span<const std::uint32_t> candidates) {
    std::vector<std::uint32_t> touching;
    for (const std::uint32_t i : candidates) {
      if (Intersect(boxes_[i].box, cell)) touching.push_back(i);
    }
    if (touching.empty()) return true;
    const Cut cut = ChooseCut(cell, touching);
    if (cut.dim < 0) return Emit(cell, touching);
    Box low = cell;
    Box high = cell;
    low[cut.dim].hi = high[cut.dim].lo = cut.at;
    return Refine(low, touching) && Refine(high, touching);
  }

  bool Emit(const Box& cell, std::span<const std::uint32_t> touching) {
    Region region{cell, {}};
    for (const std::uint32_t i : touching)
      region.ranks.insert(region.ranks.end(), boxes_[i].ranks.begin(), boxes_[i].ranks.end());
    std::sort(region.ranks.begin(), region.ranks.end());
    size_ += 1 + region.ranks.size();
    if (regions_.size() == kMaxRegions || size_ > kMaxSize) return false;
    regions_.push_back(std::move(region));
    return true;
  }

  std::span<const Region> boxes_;
  std::vector<Region> regions_;
  std::size_t size_ = 0;  // regions and their ranks
};

}  // namespace

std::vector<Region> DistinctBoxes(const Holding& holding) {
  std::vector<std::pair<const Box*, std::uint32_t>> all;
  for (const RankBoxes& held : holding.ranks) {
    for (const Box& box : held.boxes) all.emplace_back(&box, held.rank);
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    const auto order = *a.first <=> *b.first;
    return order != 0 ? order < 0 : a.second < b.second;
  });
  std::vector<Region> distinct;
  for (const auto& [box, rank] : all) {
    if (distinct.empty() || distinct.back().box != *box) distinct.push_back({*box, {}});
    distinct.back().ranks.push_back(rank);
  }
  return distinct;
}

Result<std::vector<Region>> RegionsOf(const Holding& holding) {
  std::vector<Region> distinct = DistinctBoxes(holding);
  std::vector<Box> boxes;
  boxes.reserve(distinct.size());
  for (const Region& region : distinct) boxes.push_back(region.box);
  if (!FindOverlap(boxes)) return distinct;
  TB_ASSIGN_OR_RETURN(std::vector<Region> regions, Refiner(distinct).Run());
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.box < b.box; });
  return regions;
}

RegionIndex::RegionIndex(std::span<const Region> regions) : regions_(regions) {
  std::uint64_t reach = 0;
  for (const Region& region : regions) {
    if (region.box.rank() > 0) reach = std::max(reach, region.box[0].hi);
    reach_.push_back(reach);
  }
}

std::pair<std::size_t, std::size_t> RegionIndex::Candidates(const Box& box) const {
  if (box.rank() == 0) return {0, regions_.size()};
  const auto first = std::upper_bound(reach_.begin(), reach_.end(), box[0].lo);
  const auto last = std::lower_bound(
      regions_.begin(), regions_.end(), box[0].hi,
      [](const Region& region, std::uint64_t hi) { return region.box[0].lo < hi; });
  const auto begin = static_cast<std::size_t>(first - reach_.begin());
  const auto end = static_cast<std::size_t>(last - regions_.begin());
  return {std::min(begin, end), end};
}

}  // namespace tensorbus::planner
