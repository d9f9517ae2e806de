#include "tensorbus/types/piece.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_set>

#include "tensorbus/base/malformed.h"
#include "tensorbus/types/lattice.h"

namespace tensorbus {
namespace {

/// "tensor 'a' box [0:4]".
std::string Name(const Registration& registration, const Piece& piece) {
  constexpr std::size_t kShown = 120;
  const std::string_view name = registration.tensors[piece.tensor].name;
  return fmt::format("tensor '{}' box {}", name.substr(0, kShown), piece.box.ToString());
}

/// First byte after the piece, or none when the sum overflows.
bool EndOf(const Piece& piece, std::uint32_t item_bytes, std::uint64_t* end) {
  std::uint64_t at = piece.offset;
  for (int d = 0; d < piece.box.rank(); ++d) {
    std::uint64_t step = 0;
    if (__builtin_mul_overflow(piece.box[d].size() - 1, piece.strides[static_cast<std::size_t>(d)],
                               &step) ||
        __builtin_add_overflow(at, step, &at)) {
      return false;
    }
  }
  return !__builtin_add_overflow(at, item_bytes, end);
}

Status CheckNames(const Registration& registration) {
  if (registration.tensors.size() > kMaxTensors) {
    return Malformed(fmt::format("{} tensors; at most {} are supported",
                                 registration.tensors.size(), kMaxTensors));
  }
  std::unordered_set<std::string_view> seen;
  seen.reserve(registration.tensors.size());
  for (const TensorSpec& spec : registration.tensors) {
    if (spec.name.empty() || spec.name.size() > kMaxNameBytes) {
      return Malformed(fmt::format("a tensor's name has {} bytes; 1 to {} are supported",
                                   spec.name.size(), kMaxNameBytes));
    }
    if (!seen.insert(spec.name).second)
      return Malformed(fmt::format("tensor '{}' appears twice", spec.name));
    if (spec.shape.elements() > kMaxTensorBytes / ItemBytes(spec.dtype))
      return Malformed(fmt::format("tensor '{}': more than {} bytes", spec.name, kMaxTensorBytes));
  }
  return {};
}

Status CheckPiece(const Registration& registration, std::size_t index) {
  const Piece& piece = registration.pieces[index];
  if (piece.tensor >= registration.tensors.size()) {
    return Malformed(
        fmt::format("piece {}: tensor {} of {}", index, piece.tensor, registration.tensors.size()));
  }
  const TensorSpec& spec = registration.tensors[piece.tensor];
  if (piece.segment >= registration.segment_bytes.size()) {
    return Malformed(fmt::format("{}: segment {} of {}", Name(registration, piece), piece.segment,
                                 registration.segment_bytes.size()));
  }
  if (!piece.box.Fits(spec.shape)) {
    return Malformed(
        fmt::format("{} does not fit shape {}", Name(registration, piece), spec.shape.ToString()),
        Reason::kLayoutMismatch);
  }
  if (piece.box.empty()) return Malformed(fmt::format("{} is empty", Name(registration, piece)));
  std::uint64_t end = 0;
  if (!EndOf(piece, ItemBytes(spec.dtype), &end) ||
      end > registration.segment_bytes[piece.segment]) {
    return Malformed(fmt::format("{} reaches past the end of segment {} ({} bytes)",
                                 Name(registration, piece), piece.segment,
                                 registration.segment_bytes[piece.segment]));
  }
  return {};
}

/// Indices of the pieces, tensor by tensor, in piece order within each.
std::vector<std::uint32_t> ByTensor(const Registration& registration) {
  std::vector<std::uint32_t> order(registration.pieces.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return registration.pieces[a].tensor < registration.pieces[b].tensor;
  });
  return order;
}

/// Calls `use(tensor, distinct boxes in piece order)` for each tensor that has pieces.
template <typename Use>
Status ForEachTensor(const Registration& registration, Use use) {
  const std::vector<std::uint32_t> order = ByTensor(registration);
  for (std::size_t first = 0; first < order.size();) {
    const std::uint32_t tensor = registration.pieces[order[first]].tensor;
    std::vector<Box> boxes;
    std::map<Box, bool> seen;  // filled from the second box on: one piece a tensor is the rule
    std::size_t i = first;
    for (; i < order.size() && registration.pieces[order[i]].tensor == tensor; ++i) {
      const Box& box = registration.pieces[order[i]].box;
      if (i > first) {
        if (i == first + 1) seen.emplace(boxes[0], true);
        if (!seen.emplace(box, true).second) continue;
      }
      boxes.push_back(box);
    }
    TB_RETURN_IF_ERROR(use(tensor, std::move(boxes)));
    first = i;
  }
  return {};
}

Status CheckBoxesDisjoint(const Registration& registration) {
  return ForEachTensor(registration, [&](std::uint32_t tensor, std::vector<Box> boxes) -> Status {
    const auto overlap = FindOverlap(boxes);
    if (!overlap) return {};
    return Malformed(
        fmt::format("tensor '{}': boxes {} and {} overlap without being equal",
                    registration.tensors[tensor].name, boxes[overlap->first].ToString(),
                    boxes[overlap->second].ToString()),
        Reason::kOverlap);
  });
}

Lattice LatticeOf(const Registration& registration, const Piece& piece) {
  std::array<std::uint64_t, kMaxDims> extents = {};
  for (int d = 0; d < piece.box.rank(); ++d)
    extents[static_cast<std::size_t>(d)] = piece.box[d].size();
  const auto rank = static_cast<std::size_t>(piece.box.rank());
  return Lattice(piece.offset, ItemBytes(registration.tensors[piece.tensor].dtype),
                 std::span(extents).first(rank), std::span(piece.strides).first(rank));
}

/// No byte of memory may belong to two elements, unless the two pieces are one.
Status CheckMemoryDisjoint(const Registration& registration) {
  const std::vector<Piece>& pieces = registration.pieces;
  std::vector<Lattice> lattices;
  lattices.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    lattices.push_back(LatticeOf(registration, piece));
    if (!lattices.back().SelfDisjoint()) {
      return Malformed(fmt::format("{}: its strides put two elements on one byte of memory",
                                   Name(registration, piece)),
                       Reason::kOverlap);
    }
  }
  std::vector<std::uint32_t> order(pieces.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint32_t>(i);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tuple(pieces[a].segment, pieces[a].offset, a) <
           std::tuple(pieces[b].segment, pieces[b].offset, b);
  });
  std::uint64_t budget = kMaxOverlapSteps;
  std::vector<std::uint32_t> open;  // pieces whose span may reach the next one
  for (const std::uint32_t now : order) {
    std::erase_if(open, [&](std::uint32_t before) {
      return pieces[before].segment != pieces[now].segment ||
             lattices[before].end() <= lattices[now].begin();
    });
    budget -= std::min<std::uint64_t>(budget, open.size());
    for (const std::uint32_t before : open) {
      if (budget != 0 && pieces[before] == pieces[now]) continue;
      const LatticeRelation relation = Compare(lattices[before], lattices[now], &budget);
      if (relation == LatticeRelation::kDisjoint) continue;
      const Piece& first = pieces[std::min(before, now)];
      const Piece& second = pieces[std::max(before, now)];
      if (relation == LatticeRelation::kUndecided) {
        return {Code::kResourceExhausted,
                fmt::format("{} and {}: too interleaved in memory to be shown disjoint",
                            Name(registration, first), Name(registration, second)),
                Reason::kUnsupported};
      }
      return Malformed(
          fmt::format("{} and {} overlap in memory of segment {}", Name(registration, first),
                      Name(registration, second), first.segment),
          Reason::kOverlap);
    }
    open.push_back(now);
  }
  return {};
}

}  // namespace

Status Validate(const Registration& registration, std::uint32_t rank, bool targets_disjoint) {
  const auto check = [&]() -> Status {
    TB_RETURN_IF_ERROR(CheckNames(registration));
    for (std::size_t i = 0; i < registration.pieces.size(); ++i)
      TB_RETURN_IF_ERROR(CheckPiece(registration, i));
    TB_RETURN_IF_ERROR(CheckBoxesDisjoint(registration));
    return targets_disjoint ? CheckMemoryDisjoint(registration) : Status();
  };
  return check().Annotate(fmt::format("rank {}", rank));
}

RankLayout LayoutOf(const Registration& registration) {
  RankLayout layout;
  layout.tensors.reserve(registration.tensors.size());
  for (const TensorSpec& spec : registration.tensors) layout.tensors.push_back({spec, {}});
  const Status status =
      ForEachTensor(registration, [&](std::uint32_t tensor, std::vector<Box> boxes) -> Status {
        layout.tensors[tensor].boxes = std::move(boxes);
        return {};
      });
  TB_CHECK(status.ok());
  return layout;
}

std::uint64_t EndOffset(const Piece& piece, std::uint32_t item_bytes) {
  std::uint64_t end = 0;
  TB_CHECK(EndOf(piece, item_bytes, &end));
  return end;
}

}  // namespace tensorbus
