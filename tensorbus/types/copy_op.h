#pragma once

#include <cstdint>

#include "tensorbus/types/box.h"

namespace tensorbus {

/// One copy of a plan: `box` of a tensor goes from a source rank to a target rank, or, relayed,
/// from one target rank to another.
///
/// The box lies inside exactly one box of the sending rank and one of the target rank, so each side
/// finds it in one piece of its memory.
struct CopyOp {
  std::uint32_t tensor = 0;  ///< index into the target layout's tensors
  std::uint32_t source = 0;  ///< source rank; for a relayed op the target rank that passes it on
  std::uint32_t target = 0;  ///< target rank
  bool local = false;        ///< both ranks are on one device: copied there, never sent
  bool relayed = false;      ///< `source` is a target rank that received the box in a lower round
  Box box;

  friend bool operator==(const CopyOp&, const CopyOp&) = default;
};

}  // namespace tensorbus
