#include "planner/dealer.h"

#include <algorithm>

namespace tensorbus::planner {
namespace {

/// Parts that are cut off are multiples of about this size.
constexpr std::uint64_t kCutBytes = 64 * 1024;

}  // namespace

/// How a box may be cut: along the largest dimension, in steps of whole slices.
struct Dealer::CutRule {
  int dim = -1;  ///< none for a scalar
  std::uint64_t extent = 1;
  std::uint64_t slice_bytes = 0;
  std::uint64_t step = 1;  ///< slices

  CutRule(const Box& box, std::uint64_t box_bytes) : slice_bytes(box_bytes) {
    for (int d = 0; d < box.rank(); ++d) {
      if (dim >= 0 && box[d].size() <= extent) continue;
      dim = d;
      extent = box[d].size();
    }
    slice_bytes = box_bytes / extent;
    step = std::max<std::uint64_t>(1, kCutBytes / slice_bytes);
  }
  /// Slices nearest to `bytes` that may be cut off: 0, a multiple of the step, or all.
  std::uint64_t SlicesFor(std::uint64_t bytes) const {
    const std::uint64_t slices = (bytes + slice_bytes / 2) / slice_bytes;
    const std::uint64_t rounded = (slices + step / 2) / step * step;
    return std::min(rounded, extent);
  }
};

/// Where a share ends inside the boxes that start at `at_`; their end if it reaches so far or
/// nobody comes after.
Dealer::Mark Dealer::MarkAt(std::uint64_t end, std::uint64_t box_bytes, std::uint32_t count,
                            const CutRule& rule) const {
  if (taker_ + 1 == ends_.size() || end >= at_ + box_bytes * count) return {count, 0};
  if (end <= at_) return {0, 0};
  const std::uint64_t inside = end - at_;
  const auto instance = static_cast<std::uint32_t>(inside / box_bytes);
  const std::uint64_t slice = rule.SlicesFor(inside % box_bytes);
  if (slice == rule.extent) return {instance + 1, 0};
  return {instance, slice};
}

const std::vector<Part>& Dealer::Deal(const TensorClass& tensor_class, const Box& box,
                                      std::uint32_t number) {
  parts_.clear();
  const std::uint64_t box_bytes = box.volume() * ItemBytes(tensor_class.dtype);
  const auto count = static_cast<std::uint32_t>(tensor_class.tensors.size());
  const CutRule rule(box, box_bytes);
  const auto add = [&](std::uint32_t first, std::uint32_t last, std::uint64_t lo,
                       std::uint64_t hi) {
    if (first >= last || lo >= hi) return;
    const bool whole = hi - lo == rule.extent;
    parts_.push_back({taker_, whole ? number : out_.Cut(box, rule.dim, lo, hi), first, last,
                      rule.slice_bytes * (hi - lo)});
  };
  Mark from;
  while (from.instance < count) {
    const Mark to = MarkAt(ends_[taker_], box_bytes, count, rule);
    if (from.instance == to.instance) {
      add(from.instance, from.instance + 1, from.slice, to.slice);
    } else {
      const bool cut_first = from.slice != 0;
      if (cut_first) add(from.instance, from.instance + 1, from.slice, rule.extent);
      add(from.instance + (cut_first ? 1 : 0), to.instance, 0, rule.extent);
      add(to.instance, to.instance + 1, 0, to.slice);
    }
    if (to.instance >= count) break;
    from = to;
    ++taker_;
  }
  at_ += box_bytes * count;
  while (taker_ + 1 < ends_.size() && ends_[taker_] <= at_) ++taker_;
  return parts_;
}

}  // namespace tensorbus::planner
