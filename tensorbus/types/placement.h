#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/intervals.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {

/// How a tensor lies along one mesh axis, as PyTorch's DTensor spells it.
struct Placement {
  enum class Kind : std::uint8_t { kReplicate, kShard, kStridedShard, kPartial };

  Kind kind = Kind::kReplicate;
  int dim = 0;                     ///< negative counts from the end; for the shard kinds
  std::uint64_t split_factor = 1;  ///< for kStridedShard

  std::string ToString() const;
  friend bool operator==(const Placement&, const Placement&) = default;
};

/// Reads `Replicate`, `Shard(0)`, `Shard(-1)`, `_StridedShard(0, split_factor=2)`, `Partial(sum)`,
/// with or without `()` where there is nothing to say. Error: kInvalidArgument naming the known
/// ones.
Result<Placement> ParsePlacement(std::string_view text);

/// Ranks in a grid, the last axis varying fastest.
struct DeviceMesh {
  struct Axis {
    std::string name;
    std::uint32_t size = 1;

    friend bool operator==(const Axis&, const Axis&) = default;
  };
  std::vector<Axis> axes;
  /// The flattened mesh; empty for 0..n-1. Ranks outside hold nothing.
  std::vector<std::uint32_t> rank_ids;

  friend bool operator==(const DeviceMesh&, const DeviceMesh&) = default;
};

/// What to make of a Partial placement: every rank then holds a summand of the whole, which is not
/// the tensor's value.
enum class PartialPolicy : std::uint8_t {
  kRefuse,
  kAsSummand,  ///< the caller reduces on arrival: boxes as if replicated
};

/// Checks a mesh against a job: sizes 1 and up, their product the number of rank ids, ids distinct
/// and below `rank_count`. The error names the field.
Status Validate(const DeviceMesh& mesh, std::uint32_t rank_count);

/// Who holds what, in closed form. Shards follow torch.chunk: ceil, trailing ones short or empty.
/// Each placement, in order of the mesh axes, works on what those before it left of a dimension;
/// `_StridedShard` cuts that into split_factor chunks, each of these over the axis, and takes the
/// axis's piece of every chunk.
///
/// Errors: kInvalidArgument naming the placement: a dimension out of range, another number of
/// placements than axes, a Partial that is refused, an invalid mesh.
Result<Holding> Resolve(const DeviceMesh& mesh, std::span<const Placement> placements,
                        const Shape& shape, std::uint32_t rank_count,
                        PartialPolicy partial = PartialPolicy::kRefuse);

/// The boxes of one mesh coordinate; what Resolve() gives the rank that stands there.
Result<std::vector<Box>> BoxesAt(const DeviceMesh& mesh, std::span<const Placement> placements,
                                 const Shape& shape, std::span<const std::uint32_t> coordinate,
                                 PartialPolicy partial = PartialPolicy::kRefuse);

}  // namespace tensorbus
