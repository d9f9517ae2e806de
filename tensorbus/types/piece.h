#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/box.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {

/// How one box of one logical tensor lies in one memory segment of a rank: the resolved form of
/// every view (narrow, concatenate, permute, interleave, per-head segment, expert index).
///
/// Element (i0, i1, …) of `box`, counted from the box's own corner, starts at byte
/// `offset + i0 * strides[0] + i1 * strides[1] + …` of the segment. Strides are in bytes and may be
/// in any order or have gaps; they are never negative.
struct Piece {
  std::uint32_t tensor = 0;   ///< index into the registration's tensors
  std::uint32_t segment = 0;  ///< index into the registration's segments
  Box box;
  std::uint64_t offset = 0;
  std::array<std::uint64_t, kMaxDims> strides = {};

  friend bool operator==(const Piece&, const Piece&) = default;
};

/// One rank's tensors and where they lie. Several pieces with the same tensor and box are aliases
/// (tied weights under one name): a source is read through the first, a target is written through
/// all.
struct Registration {
  std::vector<TensorSpec> tensors;
  std::vector<std::uint64_t> segment_bytes;
  std::vector<Piece> pieces;

  friend bool operator==(const Registration&, const Registration&) = default;
};

/// Checks a registration from outside: indices, bounds and overflow of every piece, names unique,
/// boxes of one tensor either equal (aliases) or disjoint. A target's pieces must moreover not
/// overlap in memory unless they are equal in tensor, box and place (`targets_disjoint`). The error
/// names tensor and box.
Status Validate(const Registration& registration, std::uint32_t rank, bool targets_disjoint);

/// What the registration holds, without addresses: one box per distinct piece box, in piece order.
RankLayout LayoutOf(const Registration& registration);

/// First byte after the piece in its segment. The piece must be valid.
std::uint64_t EndOffset(const Piece& piece, std::uint32_t item_bytes);

}  // namespace tensorbus
