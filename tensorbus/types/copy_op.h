#pragma once

#include <cstdint>

#include "tensorbus/types/box.h"

namespace tensorbus {

/// One copy of a plan: `box` of a tensor goes from a source rank to a target rank.
///
/// The box lies inside exactly one box of the source rank and one of the target rank, so each side
/// finds it in one piece of its memory.
struct CopyOp {
  std::uint32_t tensor = 0;  ///< index into the target layout's tensors
  std::uint32_t source = 0;  ///< source rank
  std::uint32_t target = 0;  ///< target rank
  bool local = false;        ///< both ranks are on one device: copied there, never sent
  Box box;

  friend bool operator==(const CopyOp&, const CopyOp&) = default;
};

}  // namespace tensorbus
