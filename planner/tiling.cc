#include "planner/tiling.h"

#include <algorithm>

namespace tensorbus::planner {

void TilingCheck::AddCorners(const Box& box, std::span<const int> dims, std::int64_t sign) {
  for (std::uint32_t bits = 0; bits < (1U << dims.size()); ++bits) {
    Corner corner;
    corner.sign = sign;
    for (std::size_t k = 0; k < dims.size(); ++k) {
      const Range& range = box[dims[k]];
      const bool high = (bits >> k & 1U) != 0;
      corner.at[k] = high ? range.hi : range.lo;
      if (high) corner.sign = -corner.sign;
    }
    corners_.push_back(corner);
  }
}

/// The parts differ along one dimension alone, so they must follow one another.
bool TilingCheck::ExactAlong(int dim, const Box& whole, std::span<const Box> parts) {
  ranges_.clear();
  for (const Box& part : parts) ranges_.push_back(part[dim]);
  std::sort(ranges_.begin(), ranges_.end());
  std::uint64_t end = whole[dim].lo;
  for (const Range& range : ranges_) {
    if (range.lo != end) return false;
    end = range.hi;
  }
  return end == whole[dim].hi;
}

bool TilingCheck::Exact(const Box& whole, std::span<const Box> parts) {
  if (parts.size() == 1) return parts[0] == whole;
  // A dimension that every part spans in full cannot go wrong; most tensors are cut along one or
  // two.
  std::array<int, kMaxDims> cut = {};
  std::size_t cut_count = 0;
  for (int d = 0; d < whole.rank(); ++d) {
    const bool full = std::all_of(parts.begin(), parts.end(),
                                  [&](const Box& part) { return part[d] == whole[d]; });
    if (!full) cut[cut_count++] = d;
  }
  if (cut_count == 1) return ExactAlong(cut[0], whole, parts);
  const std::span<const int> dims = std::span(cut).first(cut_count);
  corners_.clear();
  AddCorners(whole, dims, -1);
  for (const Box& part : parts) AddCorners(part, dims, 1);
  std::sort(corners_.begin(), corners_.end(),
            [](const Corner& a, const Corner& b) { return a.at < b.at; });
  for (std::size_t first = 0; first < corners_.size();) {
    std::int64_t sum = 0;
    std::size_t i = first;
    for (; i < corners_.size() && corners_[i].at == corners_[first].at; ++i)
      sum += corners_[i].sign;
    if (sum != 0) return false;
    first = i;
  }
  return true;
}

namespace {

/// Searches dimension by dimension: between two neighbouring faces nothing changes, so it is enough
/// to look at the first index of each such slab.
bool Search(const Box& whole, std::span<const Box> parts, int dim,
            const std::vector<std::size_t>& touching, TilingFault* fault) {
  if (dim == whole.rank()) {
    fault->twice = touching.size() > 1;
    return touching.size() != 1;
  }
  std::vector<std::uint64_t> starts = {whole[dim].lo};
  for (const std::size_t i : touching) {
    starts.push_back(parts[i][dim].lo);
    if (parts[i][dim].hi < whole[dim].hi) starts.push_back(parts[i][dim].hi);
  }
  std::sort(starts.begin(), starts.end());
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  for (const std::uint64_t at : starts) {
    std::vector<std::size_t> inside;
    for (const std::size_t i : touching) {
      if (parts[i][dim].lo <= at && at < parts[i][dim].hi) inside.push_back(i);
    }
    fault->at[static_cast<std::size_t>(dim)] = at;
    if (Search(whole, parts, dim + 1, inside, fault)) return true;
  }
  return false;
}

}  // namespace

TilingFault FirstTilingFault(const Box& whole, std::span<const Box> parts) {
  std::vector<std::size_t> all(parts.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  TilingFault fault;
  (void)Search(whole, parts, 0, all, &fault);
  return fault;
}

}  // namespace tensorbus::planner
