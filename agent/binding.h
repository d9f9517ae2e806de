#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "planner/plan.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/transport.h"
#include "tensorbus/types/box_sum.h"
#include "tensorbus/types/layout.h"
#include "tensorbus/types/piece.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::agent {

/// A block of a rank's memory before it has an address: `block.base` is null and `offset` counts
/// from the first byte of `segment`. Live memory, shadow and snapshots share it.
struct PlacedBlock {
  std::uint32_t piece = 0;  ///< index into the registration's pieces
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  StridedBlock block;

  /// The block in the memory whose segments begin at `bases`.
  StridedBlock At(std::span<std::byte* const> bases) const {
    StridedBlock placed = block;
    placed.base = bases[segment] + offset;
    return placed;
  }
};

/// A rank's pieces as blocks, found by tensor name. Immutable.
class PieceIndex {
 public:
  /// `registration` must be valid; it is kept.
  PieceIndex(Registration registration, std::string_view channel);

  const Registration& registration() const { return registration_; }
  /// Index of the tensor in the registration, or -1.
  std::int64_t TensorIndex(std::string_view name) const;
  /// What tells the tensor's digests from those of others.
  const DigestKey& KeyOf(std::uint32_t tensor) const { return keys_[tensor]; }
  std::span<const std::uint32_t> PiecesOf(std::uint32_t tensor) const { return by_tensor_[tensor]; }

  /// The part `box` of a piece, which must contain it.
  PlacedBlock Place(std::uint32_t piece, const Box& box) const;
  /// A whole piece.
  PlacedBlock Place(std::uint32_t piece) const {
    return Place(piece, registration_.pieces[piece].box);
  }
  /// "model.norm.weight[0:576]"
  std::string NameOf(std::uint32_t piece) const;

  /// Bytes of all pieces; aliases count once each.
  std::uint64_t piece_bytes() const { return piece_bytes_; }

 private:
  Registration registration_;
  std::vector<DigestKey> keys_;
  std::vector<std::vector<std::uint32_t>> by_tensor_;
  std::unordered_map<std::string_view, std::uint32_t> by_name_;
  std::uint64_t piece_bytes_ = 0;
};

/// One end of a route bound to a rank's pieces: block i is copy op i of the route.
struct BoundRoute {
  std::uint32_t source_rank = 0;
  std::uint32_t target_rank = 0;
  std::vector<PlacedBlock> blocks;
  std::vector<std::uint32_t> tensors;  ///< of each block, by the target's layout
  struct Alias {
    std::uint32_t block = 0;
    PlacedBlock place;
    PlacedBlock readback;
  };
  std::vector<Alias> aliases;  ///< target ends only
  /// Target ends only: where each block is read back, by RegisteredPlaces.
  std::vector<PlacedBlock> readback;
  std::uint64_t bytes = 0;
  /// What the blocks are, read off their places in the tensors' streams rather than off the plan.
  BoxSum boxes;

  transport::RouteEnd At(std::span<std::byte* const> bases) const;
  /// RouteReceipt.located of the blocks' sums, of which there may be fewer than blocks.
  std::uint64_t Located(std::span<const DigestSum> sums) const;
};

enum class RouteSide { kSource, kTarget };

/// Binds every route of the plan that `rank` takes part in on `side` to its memory, in order of the
/// other end's rank. Routes without ops are left out. `target` is the layout that the plan's ops
/// name their tensors by.
///
/// Error: kFailedPrecondition/kLayoutMismatch when the memory lacks a box of the plan, which then
/// was made for another registration; the message names tensor and box.
Result<std::vector<BoundRoute>> BindRoutes(const PieceIndex& pieces, const planner::Plan& plan,
                                           const JobLayout& target, std::uint32_t rank,
                                           RouteSide side);

/// Bytes that `layout` gives to `rank`.
std::uint64_t BytesOf(const JobLayout& layout, std::uint32_t rank);

}  // namespace tensorbus::agent
