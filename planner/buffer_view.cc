#include "planner/buffer_view.h"

#include <algorithm>
#include <fmt/format.h>

#include "planner/misfit.h"

namespace tensorbus::planner {
namespace {

/// Dimensions of a view that make up one dimension of a box, outermost first. What lies evenly is
/// merged; the rest is walked through.
struct Run {
  std::vector<std::uint64_t> extents;
  std::vector<std::uint64_t> strides;

  void Add(std::uint64_t extent, std::uint64_t stride) {
    if (!extents.empty() && strides.back() == stride * extent) {
      extents.back() *= extent;
      strides.back() = stride;
    } else {
      extents.push_back(extent);
      strides.push_back(stride);
    }
  }
  /// Steps of all but the innermost.
  std::uint64_t OuterSteps() const {
    std::uint64_t steps = 1;
    for (std::size_t i = 0; i + 1 < extents.size(); ++i) steps *= extents[i];
    return steps;
  }
  std::uint64_t Inner() const { return extents.empty() ? 1 : extents.back(); }
  std::uint64_t InnerStride() const { return strides.empty() ? 0 : strides.back(); }
  /// Byte offset of an outer step.
  std::uint64_t OffsetOf(std::uint64_t step) const {
    std::uint64_t offset = 0;
    for (std::size_t i = extents.size(); i-- > 1;) {
      offset += step % extents[i - 1] * strides[i - 1];
      step /= extents[i - 1];
    }
    return offset;
  }
};

}  // namespace

BufferView BufferView::Whole(const BufferSpec& buffer) {
  BufferView view;
  view.segment_ = buffer.segment;
  view.offset_ = buffer.offset;
  view.extents_.assign(buffer.shape.dims().begin(), buffer.shape.dims().end());
  view.strides_.resize(view.extents_.size());
  std::uint64_t stride = ItemBytes(buffer.dtype);
  for (std::size_t d = view.extents_.size(); d-- > 0;) {
    view.strides_[d] = stride;
    stride *= view.extents_[d];
  }
  return view;
}

Result<std::size_t> BufferView::DimIndex(int dim) const {
  const int normal = dim < 0 ? dim + rank() : dim;
  if (normal >= 0 && normal < rank()) return static_cast<std::size_t>(normal);
  return Misfit(fmt::format("dimension {} of a view of {}", dim, rank()));
}

Result<BufferView> BufferView::Narrow(int dim, std::uint64_t start, std::uint64_t length,
                                      std::uint64_t step) const {
  TB_ASSIGN_OR_RETURN(const std::size_t d, DimIndex(dim));
  const std::uint64_t n = extents_[d];
  const bool fits = step >= 1 && start <= n &&
                    (length == 0 || (start < n && (length - 1) <= (n - 1 - start) / step));
  if (!fits) {
    return Misfit(fmt::format("narrow: {} indices from {} by {} of dimension {}, which has {}",
                              length, start, step, dim, n));
  }
  BufferView view = *this;
  view.offset_ += start * strides_[d];
  view.extents_[d] = length;
  if (length > 1) view.strides_[d] *= step;
  return view;
}

Result<BufferView> BufferView::Select(int dim, std::uint64_t index) const {
  TB_ASSIGN_OR_RETURN(const std::size_t d, DimIndex(dim));
  if (index >= extents_[d]) {
    return Misfit(
        fmt::format("select: index {} of dimension {}, which has {}", index, dim, extents_[d]));
  }
  BufferView view = *this;
  view.offset_ += index * strides_[d];
  view.extents_.erase(view.extents_.begin() + static_cast<std::ptrdiff_t>(d));
  view.strides_.erase(view.strides_.begin() + static_cast<std::ptrdiff_t>(d));
  return view;
}

Result<BufferView> BufferView::Permute(const std::vector<std::uint64_t>& order) const {
  std::vector<std::uint64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool fine = sorted.size() == extents_.size();
  for (std::size_t d = 0; fine && d < sorted.size(); ++d) fine = sorted[d] == d;
  if (!fine)
    return Misfit(
        fmt::format("permute: [{}] of a view of {} dimensions", fmt::join(order, ", "), rank()));
  BufferView view = *this;
  for (std::size_t d = 0; d < order.size(); ++d) {
    view.extents_[d] = extents_[order[d]];
    view.strides_[d] = strides_[order[d]];
  }
  return view;
}

Result<BufferView> BufferView::Split(int dim, const std::vector<std::uint64_t>& sizes) const {
  constexpr std::size_t kMaxViewDims = 16;
  TB_ASSIGN_OR_RETURN(const std::size_t d, DimIndex(dim));
  std::uint64_t product = 1;
  bool fine = !sizes.empty() && extents_.size() + sizes.size() <= kMaxViewDims;
  for (const std::uint64_t size : sizes)
    fine = fine && !__builtin_mul_overflow(product, size, &product);
  if (!fine || product != extents_[d]) {
    return Misfit(fmt::format("split: dimension {} of {} into [{}]", dim, extents_[d],
                              fmt::join(sizes, ", ")));
  }
  BufferView view;
  view.segment_ = segment_;
  view.offset_ = offset_;
  for (std::size_t i = 0; i < extents_.size(); ++i) {
    if (i != d) {
      view.extents_.push_back(extents_[i]);
      view.strides_.push_back(strides_[i]);
      continue;
    }
    std::uint64_t inner = product;
    for (const std::uint64_t size : sizes) {
      inner = size == 0 ? 0 : inner / size;
      view.extents_.push_back(size);
      view.strides_.push_back(strides_[i] * inner);
    }
  }
  return view;
}

Result<BufferView> BufferView::Apply(const ViewStep& step) const {
  switch (step.kind) {
    case ViewStep::Kind::kNarrow:
      return Narrow(step.dim, step.start, step.length, step.step);
    case ViewStep::Kind::kSelect:
      return Select(step.dim, step.start);
    case ViewStep::Kind::kPermute:
      return Permute(step.dims);
    case ViewStep::Kind::kSplit:
      break;
  }
  return Split(step.dim, step.dims);
}

Result<std::vector<Piece>> BufferView::Attach(std::uint32_t tensor, const Box& box) const {
  const auto differs = [&] {
    return Misfit(fmt::format("a view of [{}] cannot hold box {}", fmt::join(extents_, ", "),
                              box.ToString()));
  };
  if (box.empty()) return Misfit(fmt::format("box {} is empty", box.ToString()));
  std::array<Run, kMaxDims> runs;
  std::size_t next = 0;
  std::uint64_t pieces = 1;
  for (int d = 0; d < box.rank(); ++d) {
    Run& run = runs[static_cast<std::size_t>(d)];
    std::uint64_t have = 1;
    while (next < extents_.size() && (have < box[d].size() || extents_[next] == 1)) {
      if (extents_[next] == 0) return differs();
      if (extents_[next] != 1) run.Add(extents_[next], strides_[next]);
      have *= extents_[next++];
    }
    if (have != box[d].size()) return differs();
    pieces *= run.OuterSteps();
    if (pieces > kMaxPiecesPerPart)
      return Misfit(fmt::format("box {} falls into more than {} pieces of memory", box.ToString(),
                                kMaxPiecesPerPart));
  }
  while (next < extents_.size() && extents_[next] == 1) ++next;
  if (next != extents_.size()) return differs();
  std::vector<Piece> out;
  out.reserve(static_cast<std::size_t>(pieces));
  for (std::uint64_t p = 0; p < pieces; ++p) {
    Piece piece{tensor, segment_, box, offset_, {}};
    std::uint64_t rest = p;
    for (int d = box.rank() - 1; d >= 0; --d) {
      const Run& run = runs[static_cast<std::size_t>(d)];
      const std::uint64_t steps = run.OuterSteps();
      const std::uint64_t step = rest % steps;
      rest /= steps;
      piece.offset += run.OffsetOf(step);
      piece.box[d].lo = box[d].lo + step * run.Inner();
      piece.box[d].hi = piece.box[d].lo + run.Inner();
      piece.strides[static_cast<std::size_t>(d)] = run.InnerStride();
    }
    out.push_back(piece);
  }
  return out;
}

}  // namespace tensorbus::planner
