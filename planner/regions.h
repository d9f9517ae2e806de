#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::planner {

/// Most regions one tensor may fall into; only boxes that overlap in odd ways come near it.
inline constexpr std::size_t kMaxRegions = 1 << 20;

/// A part of a tensor that lies in one box of each rank holding it, and in no box of any other.
struct Region {
  Box box;
  std::vector<std::uint32_t> ranks;  ///< ascending

  friend bool operator==(const Region&, const Region&) = default;
};

/// The distinct boxes of a holding, each with the ranks that have it, ordered by box. They may
/// overlap.
std::vector<Region> DistinctBoxes(const Holding& holding);

/// Cuts what a job holds of one tensor into disjoint regions, ordered by box. Where the distinct
/// boxes of the ranks are disjoint, as under every mesh placement of one kind, these are the
/// regions. Error: kResourceExhausted beyond kMaxRegions.
Result<std::vector<Region>> RegionsOf(const Holding& holding);

/// Finds the regions that a box touches, among many.
class RegionIndex {
 public:
  /// Borrows the regions, which are ordered by box.
  explicit RegionIndex(std::span<const Region> regions);

  /// [first, last) of the regions that may touch `box`; all that do are among them.
  std::pair<std::size_t, std::size_t> Candidates(const Box& box) const;

 private:
  std::span<const Region> regions_;
  std::vector<std::uint64_t> reach_;  ///< largest end along dimension 0 up to each region
};

}  // namespace tensorbus::planner
