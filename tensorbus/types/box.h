#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tensorbus/base/status.h"

namespace tensorbus {

/// Most dimensions a tensor may have.
inline constexpr int kMaxDims = 8;
/// Most elements or bytes of one tensor: sums and products of valid sizes stay far below 2^63.
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 56;

/// Sizes of a tensor's dimensions, 0 to 8 of them. A scalar has none and one element. Immutable
/// value.
class Shape {
 public:
  Shape() = default;
  /// Errors: kInvalidArgument when there are more than kMaxDims or the product exceeds
  /// kMaxTensorBytes.
  static Result<Shape> Create(std::span<const std::uint64_t> dims);

  int rank() const { return rank_; }
  std::uint64_t operator[](int dim) const { return dims_[static_cast<std::size_t>(dim)]; }
  std::span<const std::uint64_t> dims() const {
    return {dims_.data(), static_cast<std::size_t>(rank_)};
  }
  std::uint64_t elements() const;
  std::string ToString() const;  ///< "[4096, 128]"

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::uint64_t, kMaxDims> dims_ = {};
  std::uint8_t rank_ = 0;
};

/// Half-open index interval.
struct Range {
  std::uint64_t lo = 0;
  std::uint64_t hi = 0;

  std::uint64_t size() const { return hi - lo; }
  bool empty() const { return lo >= hi; }
  friend auto operator<=>(const Range&, const Range&) = default;
};

/// Half-open index range per dimension of a logical tensor. A scalar's box has no dimension and one
/// element.
class Box {
 public:
  Box() = default;
  explicit Box(std::span<const Range> ranges);
  /// The whole index space of `shape`.
  static Box Whole(const Shape& shape);

  int rank() const { return rank_; }
  const Range& operator[](int dim) const { return ranges_[static_cast<std::size_t>(dim)]; }
  Range& operator[](int dim) { return ranges_[static_cast<std::size_t>(dim)]; }
  std::span<const Range> ranges() const {
    return {ranges_.data(), static_cast<std::size_t>(rank_)};
  }

  bool empty() const;
  /// Elements inside; 0 when empty.
  std::uint64_t volume() const;
  /// Whether this box lies inside [0, shape) and has its number of dimensions.
  bool Fits(const Shape& shape) const;
  bool Contains(const Box& inner) const;
  std::string ToString() const;  ///< "[0:4, 128:256]"

  friend auto operator<=>(const Box&, const Box&) = default;

 private:
  std::array<Range, kMaxDims> ranges_ = {};
  std::uint8_t rank_ = 0;
};

/// The common part of two boxes of one tensor; none when it is empty.
std::optional<Box> Intersect(const Box& a, const Box& b);

/// Two of `boxes` (all of one number of dimensions, none empty) that share an element, as indices
/// with the smaller first; none when all are disjoint. Near n log n for the layouts that occur.
std::optional<std::pair<std::size_t, std::size_t>> FindOverlap(std::span<const Box> boxes);

}  // namespace tensorbus
