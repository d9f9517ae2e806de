#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/types/box.h"

namespace tensorbus::planner {

/// Tells whether boxes cover another box, every element exactly once.
///
/// Works on signed corners: the function that counts how often each element is covered is known
/// from its jumps at the corners of the boxes, so the cover is exact when the corners of the parts,
/// with their signs, add up to those of the whole. Keeps its scratch memory between calls.
/// Confined.
class TilingCheck {
 public:
  /// `parts` are not empty, lie inside `whole` and have its dimensions.
  bool Exact(const Box& whole, std::span<const Box> parts);

 private:
  struct Corner {
    std::array<std::uint64_t, kMaxDims> at = {};
    std::int64_t sign = 0;
  };
  bool ExactAlong(int dim, const Box& whole, std::span<const Box> parts);
  void AddCorners(const Box& box, std::span<const int> dims, std::int64_t sign);

  std::vector<Range> ranges_;
  std::vector<Corner> corners_;
};

/// What is wrong with parts that are not an exact cover: the first element, in row-major order,
/// that is missing or covered twice.
struct TilingFault {
  bool twice = false;  ///< else missing
  std::array<std::uint64_t, kMaxDims> at = {};
};
TilingFault FirstTilingFault(const Box& whole, std::span<const Box> parts);

}  // namespace tensorbus::planner
