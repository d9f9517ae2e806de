#include "tensorbus/types/lattice.h"

#include <algorithm>

namespace tensorbus {
namespace {

__extension__ typedef __int128 Offset;  // differences of offsets, far from overflow

Offset FloorDiv(Offset a, Offset b) {
  const Offset q = a / b;
  return a % b != 0 && a < 0 ? q - 1 : q;
}

/// One block of the dimensions from `level` on, at `at`.
struct Block {
  const Lattice* lattice;
  int level;
  Offset at;

  bool IsRun() const { return level == lattice->rank(); }
  Offset span() const { return static_cast<Offset>(lattice->SpanFrom(level)); }
  Offset stride() const { return static_cast<Offset>(lattice->stride(level)); }
  Offset extent() const { return static_cast<Offset>(lattice->extent(level)); }
  Block Inner(Offset index) const { return {lattice, level + 1, at + index * stride()}; }
};

bool SpansMeet(const Block& a, const Block& b) {
  return a.at < b.at + b.span() && b.at < a.at + a.span();
}

LatticeRelation Visit(const Block& a, const Block& b, std::uint64_t* budget);

/// Both step by one stride, and an inner block of either is shorter than it: only the difference of
/// the two indices matters, and few differences bring inner blocks together.
LatticeRelation VisitInStep(const Block& a, const Block& b, std::uint64_t* budget) {
  const Offset stride = a.stride();
  const Offset gap = b.at - a.at;  // inner blocks meet when i - j is near gap / stride
  const Offset low = FloorDiv(gap - a.Inner(0).span(), stride);
  const Offset high = FloorDiv(gap + b.Inner(0).span(), stride) + 1;
  for (Offset shift = low; shift <= high; ++shift) {
    const Offset i = shift > 0 ? shift : 0;  // smallest pair of indices with i - j == shift
    const Offset j = i - shift;
    if (i >= a.extent() || j >= b.extent()) continue;
    const LatticeRelation relation = Visit(a.Inner(i), b.Inner(j), budget);
    if (relation != LatticeRelation::kDisjoint) return relation;
  }
  return LatticeRelation::kDisjoint;
}

/// Every inner block of `outer` that may reach `other`.
LatticeRelation VisitInner(const Block& outer, const Block& other, std::uint64_t* budget) {
  const Offset stride = outer.stride();
  const Offset inner = outer.Inner(0).span();
  const Offset low = std::max<Offset>(0, FloorDiv(other.at - outer.at - inner, stride));
  const Offset high =
      std::min<Offset>(outer.extent() - 1, FloorDiv(other.at + other.span() - outer.at, stride));
  for (Offset i = low; i <= high; ++i) {
    const LatticeRelation relation = Visit(outer.Inner(i), other, budget);
    if (relation != LatticeRelation::kDisjoint) return relation;
  }
  return LatticeRelation::kDisjoint;
}

LatticeRelation Visit(const Block& a, const Block& b, std::uint64_t* budget) {
  if (*budget == 0) return LatticeRelation::kUndecided;
  --*budget;
  if (!SpansMeet(a, b)) return LatticeRelation::kDisjoint;
  if (a.IsRun() && b.IsRun()) return LatticeRelation::kOverlapping;
  if (a.IsRun()) return VisitInner(b, a, budget);
  if (b.IsRun()) return VisitInner(a, b, budget);
  if (a.stride() == b.stride()) return VisitInStep(a, b, budget);
  return a.stride() > b.stride() ? VisitInner(a, b, budget) : VisitInner(b, a, budget);
}

}  // namespace

Lattice::Lattice(std::uint64_t begin, std::uint64_t item_bytes,
                 std::span<const std::uint64_t> extents, std::span<const std::uint64_t> strides)
    : begin_(begin), run_bytes_(item_bytes) {
  std::array<std::size_t, kMaxDims> order = {};
  std::size_t count = 0;
  for (std::size_t d = 0; d < extents.size(); ++d) {
    if (extents[d] > 1) order[count++] = d;
  }
  std::stable_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count),
                   [&](std::size_t a, std::size_t b) { return strides[a] > strides[b]; });
  while (count > 0 && strides[order[count - 1]] == run_bytes_)
    run_bytes_ *= extents[order[--count]];
  for (std::size_t k = 0; k < count; ++k) {
    const std::uint64_t extent = extents[order[k]];
    const std::uint64_t stride = strides[order[k]];
    auto& last = strides_[static_cast<std::size_t>(std::max(rank_ - 1, 0))];
    if (rank_ > 0 && stride != 0 && last / stride == extent && last % stride == 0) {
      extents_[static_cast<std::size_t>(rank_ - 1)] *= extent;  // the outer continues the inner
      last = stride;
    } else {
      extents_[static_cast<std::size_t>(rank_)] = extent;
      strides_[static_cast<std::size_t>(rank_)] = stride;
      ++rank_;
    }
  }
  spans_[static_cast<std::size_t>(rank_)] = run_bytes_;
  for (int k = rank_ - 1; k >= 0; --k) {
    self_disjoint_ = self_disjoint_ && stride(k) >= SpanFrom(k + 1);
    spans_[static_cast<std::size_t>(k)] = (extent(k) - 1) * stride(k) + SpanFrom(k + 1);
  }
}

LatticeRelation Compare(const Lattice& a, const Lattice& b, std::uint64_t* budget) {
  return Visit({&a, 0, static_cast<Offset>(a.begin())}, {&b, 0, static_cast<Offset>(b.begin())},
               budget);
}

}  // namespace tensorbus
