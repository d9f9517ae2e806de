#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/box.h"

namespace tensorbus {

/// Bounds on what one rank may hold of one tensor: intervals along a dimension, boxes in all.
inline constexpr std::size_t kMaxIntervals = 1 << 16;
inline constexpr std::size_t kMaxBoxesPerRank = 1 << 16;
/// Boxes that all ranks together may hold of one tensor.
inline constexpr std::size_t kMaxBoxesPerHolding = 1 << 20;
/// Most boxes in all holdings of a layout that is resolved from placements or read from a file.
inline constexpr std::uint64_t kMaxBoxesPerLayout = std::uint64_t{1} << 23;

/// Indices along one dimension: ascending, disjoint, neither empty nor touching. The k-th index of
/// the list is its *local* index k, as a shard numbers its own rows.
using IntervalList = std::vector<Range>;

/// Indices in the list.
std::uint64_t LengthOf(const IntervalList& list);
/// Appends a range that starts at or after the list's end; touching ranges become one, empty ones
/// are dropped.
void Append(IntervalList* list, const Range& range);
/// The indices with local numbers [lo, hi); numbers past the end are left out.
IntervalList Slice(const IntervalList& list, std::uint64_t lo, std::uint64_t hi);
/// Part `index` of `parts` as torch.chunk cuts n indices: ceil(n / parts) each, the last ones short
/// or empty. `parts` is at least 1.
Range ChunkOf(std::uint64_t n, std::uint64_t parts, std::uint64_t index);
/// Part `index` of `parts` when the first n % parts parts take one more. `parts` is at least 1.
Range EvenPartOf(std::uint64_t n, std::uint64_t parts, std::uint64_t index);

/// All boxes of the product of one list per dimension, row-major; one box without dimensions for
/// none. Error: kInvalidArgument beyond kMaxBoxesPerRank.
Result<std::vector<Box>> BoxesOf(std::span<const IntervalList> dims);

}  // namespace tensorbus
