#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "tensorbus/types/piece.h"
#include "tensorbus/types/view_spec.h"

namespace tensorbus::planner {

/// Most pieces that one part of a tensor may fall into in memory.
inline constexpr std::uint64_t kMaxPiecesPerPart = 1 << 16;

/// A strided window on a buffer, as an array library's view is. Immutable value; the operations
/// give new ones. Errors of all: kInvalidArgument saying what does not fit.
class BufferView {
 public:
  static BufferView Whole(const BufferSpec& buffer);

  /// Dimension `dim` (negative: from the end) from `start`, `length` indices, every `step`-th.
  Result<BufferView> Narrow(int dim, std::uint64_t start, std::uint64_t length,
                            std::uint64_t step = 1) const;
  /// Index `index` of a dimension, which goes away.
  Result<BufferView> Select(int dim, std::uint64_t index) const;
  Result<BufferView> Permute(const std::vector<std::uint64_t>& order) const;
  /// Replaces a dimension by several whose product it is.
  Result<BufferView> Split(int dim, const std::vector<std::uint64_t>& sizes) const;
  Result<BufferView> Apply(const ViewStep& step) const;

  int rank() const { return static_cast<int>(extents_.size()); }
  std::uint64_t extent(int dim) const { return extents_[static_cast<std::size_t>(dim)]; }

  /// Says that this view holds `box` of a tensor: the same elements in the same row-major order.
  /// The view may have more dimensions than the box (runs of them then make up one of the box's);
  /// where these do not lie evenly in memory, one piece a step of the outer ones comes out. Error:
  /// sizes that differ, or more than kMaxPiecesPerPart.
  Result<std::vector<Piece>> Attach(std::uint32_t tensor, const Box& box) const;

 private:
  Result<std::size_t> DimIndex(int dim) const;

  std::uint32_t segment_ = 0;
  std::uint64_t offset_ = 0;
  std::vector<std::uint64_t> extents_;
  std::vector<std::uint64_t> strides_;  // bytes
};

}  // namespace tensorbus::planner
