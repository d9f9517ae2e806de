#pragma once

#include <cstdint>
#include <vector>

#include "tensorbus/types/box.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {

/// Says in two numbers which boxes of which of a layout's tensors something is about.
///
/// Additive: disjoint boxes that make up another one sum up to its sum, however it was cut. So the
/// routes into a rank must sum up to what its layout gives it. A box is the signed sum of a hash of
/// its corners (those inside a cut come once with each sign), times an odd number that belongs to
/// the tensor; what differs in one tensor goes unnoticed with probability 2^-64 or so, and nobody
/// has to send a list of boxes. Not made to withstand forgery.
struct BoxSum {
  std::uint64_t sum = 0;
  std::uint64_t located = 0;  ///< each tensor's part times its number, counted from 1

  void Add(std::uint32_t tensor, const Box& box);
  BoxSum& operator+=(const BoxSum& other) {
    sum += other.sum;
    located += other.located;
    return *this;
  }
  friend bool operator==(const BoxSum&, const BoxSum&) = default;
};

/// What the layout gives to each rank. Takes time by tensors and by distinct holdings, not by their
/// product.
std::vector<BoxSum> BoxSumsOf(const JobLayout& layout);

/// The index of the one tensor (of `tensor_count`) in which the two sums differ; -1 when they
/// differ in several, or not at all.
std::int64_t DifferingTensor(const BoxSum& a, const BoxSum& b, std::uint32_t tensor_count);

}  // namespace tensorbus
