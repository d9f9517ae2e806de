#include "tensorbus/types/intervals.h"

#include <algorithm>
#include <fmt/format.h>

namespace tensorbus {

std::uint64_t LengthOf(const IntervalList& list) {
  std::uint64_t length = 0;
  for (const Range& range : list) length += range.size();
  return length;
}

void Append(IntervalList* list, const Range& range) {
  if (range.empty()) return;
  if (!list->empty() && list->back().hi == range.lo) {
    list->back().hi = range.hi;
  } else {
    list->push_back(range);
  }
}

IntervalList Slice(const IntervalList& list, std::uint64_t lo, std::uint64_t hi) {
  IntervalList out;
  std::uint64_t local = 0;  // local number of the current range's first index
  for (const Range& range : list) {
    const std::uint64_t first = std::max(lo, local);
    const std::uint64_t last = std::min(hi, local + range.size());
    if (first < last) Append(&out, {range.lo + (first - local), range.lo + (last - local)});
    local += range.size();
  }
  return out;
}

Range ChunkOf(std::uint64_t n, std::uint64_t parts, std::uint64_t index) {
  const std::uint64_t size = n / parts + (n % parts != 0 ? 1 : 0);
  if (size == 0 || index > n / size) return {n, n};
  return {std::min(n, size * index), std::min(n, size * index + size)};
}

Range EvenPartOf(std::uint64_t n, std::uint64_t parts, std::uint64_t index) {
  const std::uint64_t base = n / parts;
  const std::uint64_t extra = n % parts;
  const std::uint64_t lo = index * base + std::min(index, extra);
  return {lo, lo + base + (index < extra ? 1 : 0)};
}

Result<std::vector<Box>> BoxesOf(std::span<const IntervalList> dims) {
  std::uint64_t count = 1;
  for (const IntervalList& list : dims) {
    count *= list.size();
    if (count > kMaxBoxesPerRank) {
      return Status(Code::kInvalidArgument,
                    fmt::format("a rank would hold more than {} boxes", kMaxBoxesPerRank),
                    Reason::kMalformed);
    }
  }
  std::vector<Box> boxes;
  boxes.reserve(static_cast<std::size_t>(count));
  std::array<Range, kMaxDims> ranges = {};
  const auto rank = dims.size();
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t rest = i;
    for (std::size_t d = rank; d-- > 0;) {
      ranges[d] = dims[d][static_cast<std::size_t>(rest % dims[d].size())];
      rest /= dims[d].size();
    }
    boxes.emplace_back(std::span(ranges).first(rank));
  }
  return boxes;
}

}  // namespace tensorbus
