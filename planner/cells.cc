#include <algorithm>
#include <fmt/format.h>
#include <optional>

#include "planner/class_plan.h"
#include "planner/regions.h"

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

Status NoHolder(const Holding& source, const Region& needed, std::span<const Region> regions,
                PlanFault* fault) {
  std::vector<Box> held;
  for (const Region& region : regions) {
    if (Intersect(region.box, needed.box)) held.push_back(region.box);
  }
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

/// Pairs of boxes that are intersected at most: some seconds.
constexpr std::uint64_t kMaxCompared = std::uint64_t{1} << 30;

/// Distinct boxes of a holding, or its regions, with their ranks as numbers of sets.
struct NumberedRegions {
  std::vector<Region> regions;
  std::vector<std::uint32_t> sets;
};

std::uint64_t RankCountOf(const NumberedRegions& regions) {
  std::uint64_t count = 0;
  for (const Region& region : regions.regions) count += region.ranks.size();
  return count;
}

/// No fewer parts than this arise, told without looking at any pair of boxes: all pairs, less those
/// that each dimension keeps apart. Exact where no pair is apart in two dimensions, as between rows
/// and columns, which is where there are most.
std::uint64_t LeastParts(const NumberedRegions& held, const NumberedRegions& needed) {
  std::uint64_t parts = held.regions.size() * RankCountOf(needed);
  const int dims = held.regions.empty() ? 0 : held.regions.front().box.rank();
  for (int d = 0; d < dims; ++d) {
    std::vector<std::uint64_t> begins;
    std::vector<std::uint64_t> ends;
    for (const Region& region : held.regions) {
      begins.push_back(region.box[d].lo);
      ends.push_back(region.box[d].hi);
    }
    std::sort(begins.begin(), begins.end());
    std::sort(ends.begin(), ends.end());
    for (const Region& need : needed.regions) {
      const auto before = std::upper_bound(ends.begin(), ends.end(), need.box[d].lo);
      const auto after = std::lower_bound(begins.begin(), begins.end(), need.box[d].hi);
      const auto apart =
          static_cast<std::uint64_t>((before - ends.begin()) + (begins.end() - after));
      parts -= std::min(parts, apart * need.ranks.size());
    }
  }
  return parts;
}

Hash128 DigestOf(const LayoutMatch& match) {
  Hasher hasher;
  hasher.AddU32(match.source->rank_count);
  hasher.AddU32(match.target->rank_count);
  hasher.AddU64(match.classes.size());
  for (const TensorClass& c : match.classes) {
    hasher.AddU8(static_cast<std::uint8_t>(c.dtype));
    hasher.AddU8(static_cast<std::uint8_t>(c.shape.rank()));
    for (const std::uint64_t dim : c.shape.dims()) hasher.AddU64(dim);
    hasher.AddU64(c.tensors.size());
    for (const std::uint32_t t : c.tensors) {
      hasher.AddU32(t);
      hasher.AddString(match.target->tensors[t].spec.name);
    }
  }
  return hasher.Finish();
}

/// Intersects class by class. Many classes share a holding, so what is known of one is kept.
class Matcher {
 public:
  Matcher(const JobLayout& source, const JobLayout& target, const PlanOptions& options)
      : source_(source),
        target_(target),
        options_(options),
        held_(source.holdings.size()),
        needed_(target.holdings.size()) {}

  Result<LayoutMatch> Run(PlanFault* fault) && {
    match_.source = &source_;
    match_.target = &target_;
    TB_ASSIGN_OR_RETURN(match_.classes, Classify(source_, target_, fault));
    match_.cells.resize(match_.classes.size());
    for (std::size_t c = 0; c < match_.classes.size(); ++c) {
      const Status status = Overlay(match_.classes[c], &match_.cells[c], fault);
      if (status.ok()) continue;
      const std::string& name = target_.tensors[match_.classes[c].tensors.front()].spec.name;
      if (fault != nullptr) fault->tensor = name;
      return status.Annotate(fmt::format("tensor '{}'", name));
    }
    match_.digest = DigestOf(match_);
    return std::move(match_);
  }

 private:
  NumberedRegions Number(std::vector<Region> regions) {
    NumberedRegions numbered{std::move(regions), {}};
    for (const Region& region : numbered.regions)
      numbered.sets.push_back(match_.rank_sets.Add(region.ranks));
    return numbered;
  }

  Status Overlay(const TensorClass& c, std::vector<Cell>* cells, PlanFault* fault) {
    std::optional<NumberedRegions>& held = held_[c.source_holding];
    if (!held) {
      TB_ASSIGN_OR_RETURN(std::vector<Region> regions,
                          RegionsOf(source_.holdings[c.source_holding]));
      held = Number(std::move(regions));
    }
    std::optional<NumberedRegions>& needed = needed_[c.target_holding];
    if (!needed) {
      const Holding& holding = target_.holdings[c.target_holding];
      std::vector<Region> regions = DistinctBoxes(holding);
      if (options_.relays) {
        TB_ASSIGN_OR_RETURN(regions, RegionsOf(holding));
      }
      needed = Number(std::move(regions));
    }
    if (held->regions.size() * RankCountOf(*needed) > kMaxPlanParts) {
      const std::uint64_t least = LeastParts(*held, *needed);
      if (parts_ + least > kMaxPlanParts) return TooManyParts(parts_ + least);
    }
    const RegionIndex index(held->regions);
    for (std::size_t n = 0; n < needed->regions.size(); ++n) {
      const Region& need = needed->regions[n];
      std::uint64_t volume = 0;
      const auto [first, last] = index.Candidates(need.box);
      compared_ += last - first;
      if (parts_ > kMaxPlanParts || compared_ > kMaxCompared) return TooManyParts(parts_);
      for (std::size_t r = first; r < last; ++r) {
        const auto common = Intersect(held->regions[r].box, need.box);
        if (!common) continue;
        volume += common->volume();
        parts_ += need.ranks.size();
        cells->push_back({match_.boxes.Add(*common), held->sets[r], needed->sets[n]});
      }
      if (volume != need.box.volume())
        return NoHolder(source_.holdings[c.source_holding], need, held->regions, fault);
    }
    return {};
  }

  static Status TooManyParts(std::uint64_t least) {
    return {Code::kResourceExhausted,
            fmt::format("these layouts cut the tensors up to here into at least {} parts that one "
                        "target needs of one source box; at most {} are supported",
                        least, kMaxPlanParts),
            Reason::kUnsupported};
  }

  const JobLayout& source_;
  const JobLayout& target_;
  const PlanOptions& options_;
  std::uint64_t parts_ = 0;                           // boxes that some target needs of some region
  std::uint64_t compared_ = 0;                        // pairs of boxes
  std::vector<std::optional<NumberedRegions>> held_;  // by source holding
  std::vector<std::optional<NumberedRegions>> needed_;  // by target holding
  LayoutMatch match_;
};

}  // namespace

Result<LayoutMatch> MatchLayouts(const JobLayout& source, const JobLayout& target,
                                 const PlanOptions& options, PlanFault* fault) {
  return Matcher(source, target, options).Run(fault);
}

}  // namespace tensorbus::planner
