#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "tensorbus/types/box.h"

namespace tensorbus {

/// Steps that comparing the pieces of one registration may take in all; ordinary views need a few a
/// pair, so only hostile input meets it.
inline constexpr std::uint64_t kMaxOverlapSteps = std::uint64_t{1} << 27;

/// The set of bytes that a strided block covers: `item_bytes` at `begin + Σ i_k * stride_k`,
/// brought to a normal form (outermost stride first, unit extents dropped, contiguous dimensions
/// merged). Immutable value.
class Lattice {
 public:
  /// The block must not be empty and its end must not overflow.
  Lattice(std::uint64_t begin, std::uint64_t item_bytes, std::span<const std::uint64_t> extents,
          std::span<const std::uint64_t> strides);

  std::uint64_t begin() const { return begin_; }
  std::uint64_t end() const { return begin_ + SpanFrom(0); }
  /// Whether every element has bytes of its own, each inner block lying within one step of the next
  /// outer stride. Strides that interleave without being nested count as not disjoint.
  bool SelfDisjoint() const { return self_disjoint_; }

  int rank() const { return rank_; }
  std::uint64_t run_bytes() const { return run_bytes_; }
  std::uint64_t extent(int k) const { return extents_[static_cast<std::size_t>(k)]; }
  std::uint64_t stride(int k) const { return strides_[static_cast<std::size_t>(k)]; }
  /// Bytes from the first to past the last byte of one block of the dimensions from `k` on.
  std::uint64_t SpanFrom(int k) const { return spans_[static_cast<std::size_t>(k)]; }

 private:
  std::uint64_t begin_ = 0;
  std::uint64_t run_bytes_ = 0;  ///< contiguous bytes innermost
  int rank_ = 0;
  bool self_disjoint_ = true;
  std::array<std::uint64_t, kMaxDims> extents_ = {};
  std::array<std::uint64_t, kMaxDims> strides_ = {};
  std::array<std::uint64_t, kMaxDims + 1> spans_ = {};
};

enum class LatticeRelation : std::uint8_t { kDisjoint, kOverlapping, kUndecided };

/// Whether two self-disjoint lattices share a byte. Takes steps from `budget` and answers
/// kUndecided when it runs out.
LatticeRelation Compare(const Lattice& a, const Lattice& b, std::uint64_t* budget);

}  // namespace tensorbus
