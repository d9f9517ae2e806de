#pragma once

#include <cstdint>
#include <vector>

#include "planner/choose.h"

namespace tensorbus::planner {

/// A part of the boxes that a run of tensors of one class needs, and who gets to send it.
struct Part {
  std::size_t taker = 0;    ///< index into the shares
  std::uint32_t box = 0;    ///< as in Passage, before boxes get their final numbers
  std::uint32_t first = 0;  ///< tensors of the class: [first, last)
  std::uint32_t last = 0;
  std::uint64_t bytes = 0;  ///< of one tensor's box
};

/// Deals boxes, in order, to takers until each has its share. So consecutive boxes go to one taker
/// and are cut only where a share ends: along their largest dimension, in steps of about 64 KiB, so
/// small boxes stay whole. Confined.
class Dealer {
 public:
  /// `ends`: running sums of the shares in bytes, not empty; the last taker gets all that is left.
  /// Boxes that are cut are added to `out`, which is borrowed.
  Dealer(std::vector<std::uint64_t> ends, ChosenPaths* out) : ends_(std::move(ends)), out_(*out) {}

  /// Deals a box of all tensors of a class; `number` is its own. The parts are valid until the next
  /// call.
  const std::vector<Part>& Deal(const TensorClass& tensor_class, const Box& box,
                                std::uint32_t number);

 private:
  struct CutRule;
  /// A place in the run of all tensors' boxes.
  struct Mark {
    std::uint32_t instance = 0;
    std::uint64_t slice = 0;
  };

  Mark MarkAt(std::uint64_t end, std::uint64_t box_bytes, std::uint32_t count,
              const CutRule& rule) const;

  std::vector<std::uint64_t> ends_;
  ChosenPaths& out_;
  std::vector<Part> parts_;
  std::size_t taker_ = 0;
  std::uint64_t at_ = 0;  // bytes dealt before the current box
};

}  // namespace tensorbus::planner
