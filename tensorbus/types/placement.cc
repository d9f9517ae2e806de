#include "tensorbus/types/placement.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>

#include "tensorbus/base/malformed.h"

namespace tensorbus {
namespace {

/// Consumes `prefix` from the front of `text` if it stands there.
bool Eat(std::string_view* text, std::string_view prefix) {
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

template <typename Number>
bool EatNumber(std::string_view* text, Number* number) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc()) return false;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return true;
}

bool EatSplitFactor(std::string_view* text, std::uint64_t* factor) {
  if (!Eat(text, ",")) return false;
  while (Eat(text, " ")) {
  }
  (void)Eat(text, "split_factor=");
  (void)Eat(text, "sf=");
  return EatNumber(text, factor) && *factor >= 1;
}

/// A dimension counted from the front, or -1 when there is no such one.
int NormalDim(int dim, int rank) {
  const int normal = dim < 0 ? dim + rank : dim;
  return normal >= 0 && normal < rank ? normal : -1;
}

/// What `coordinate` of an axis of `size` keeps of a dimension.
Result<IntervalList> Keep(const Placement& placement, const IntervalList& list, std::uint32_t size,
                          std::uint32_t coordinate) {
  const std::uint64_t n = LengthOf(list);
  if (placement.kind == Placement::Kind::kShard) {
    const Range part = ChunkOf(n, size, coordinate);
    return Slice(list, part.lo, part.hi);
  }
  IntervalList kept;
  IntervalList local;  // in local numbers first: one walk over `list` for all chunks
  for (std::uint64_t chunk = 0; chunk < placement.split_factor; ++chunk) {
    const Range whole = ChunkOf(n, placement.split_factor, chunk);
    if (whole.empty()) break;
    const Range part = ChunkOf(whole.size(), size, coordinate);
    Append(&local, {whole.lo + part.lo, whole.lo + part.hi});
    if (local.size() > kMaxIntervals) {
      return Malformed(
          fmt::format("{} leaves more than {} intervals", placement.ToString(), kMaxIntervals));
    }
  }
  std::size_t at = 0;
  std::uint64_t before = 0;  // local number of list[at]'s first index
  for (const Range& want : local) {
    std::uint64_t lo = want.lo;
    while (lo < want.hi) {
      while (before + list[at].size() <= lo) before += list[at++].size();
      const std::uint64_t hi = std::min(want.hi, before + list[at].size());
      Append(&kept, {list[at].lo + (lo - before), list[at].lo + (hi - before)});
      lo = hi;
    }
  }
  return kept;
}

Status CheckPlacements(const DeviceMesh& mesh, std::span<const Placement> placements,
                       const Shape& shape, PartialPolicy partial) {
  if (placements.size() != mesh.axes.size()) {
    return Malformed(
        fmt::format("placements: {} for a mesh of {} axes", placements.size(), mesh.axes.size()));
  }
  for (const Placement& placement : placements) {
    if (placement.kind == Placement::Kind::kReplicate) continue;
    if (placement.kind == Placement::Kind::kPartial) {
      if (partial == PartialPolicy::kAsSummand) continue;
      return Malformed(
          "placements: Partial: each rank holds a summand of the tensor, not a part of it; reduce "
          "it first (redistribute to Replicate or Shard)",
          Reason::kUnsupported);
    }
    if (NormalDim(placement.dim, shape.rank()) < 0) {
      return Malformed(fmt::format("placements: {}: the tensor has {} dimensions",
                                   placement.ToString(), shape.rank()));
    }
  }
  return {};
}

/// A strided shard walks over its chunks once for every rank; refuses what would take seconds.
Status CheckWork(std::span<const Placement> placements, const Shape& shape,
                 std::uint64_t positions) {
  constexpr std::uint64_t kMaxChunks = std::uint64_t{1} << 26;
  for (const Placement& placement : placements) {
    if (placement.kind != Placement::Kind::kStridedShard) continue;
    const std::uint64_t n = shape[NormalDim(placement.dim, shape.rank())];
    const std::uint64_t chunks = std::min(placement.split_factor, n);
    if (chunks > kMaxChunks / positions) {
      return Malformed(fmt::format("placements: {}: too many chunks for {} ranks",
                                   placement.ToString(), positions));
    }
  }
  return {};
}

}  // namespace

std::string Placement::ToString() const {
  switch (kind) {
    case Kind::kReplicate:
      return "Replicate";
    case Kind::kShard:
      return fmt::format("Shard({})", dim);
    case Kind::kStridedShard:
      return fmt::format("_StridedShard({}, split_factor={})", dim, split_factor);
    case Kind::kPartial:
      break;
  }
  return "Partial";
}

Result<Placement> ParsePlacement(std::string_view text) {
  Placement placement;
  std::string_view rest = text;
  bool fine = false;
  if (Eat(&rest, "Replicate")) {
    (void)Eat(&rest, "()");
    fine = true;
  } else if (Eat(&rest, "Partial")) {
    placement.kind = Placement::Kind::kPartial;
    fine = rest.empty() || (rest.front() == '(' && rest.find(')') == rest.size() - 1);
    rest = {};
  } else if (Eat(&rest, "Shard(")) {
    placement.kind = Placement::Kind::kShard;
    (void)Eat(&rest, "dim=");
    fine = EatNumber(&rest, &placement.dim) && Eat(&rest, ")");
  } else if (Eat(&rest, "_StridedShard(")) {
    placement.kind = Placement::Kind::kStridedShard;
    (void)Eat(&rest, "dim=");
    fine = EatNumber(&rest, &placement.dim) && EatSplitFactor(&rest, &placement.split_factor) &&
           Eat(&rest, ")");
  }
  if (fine && rest.empty()) return placement;
  return Malformed(fmt::format(
      "unknown placement '{}'; known: Replicate, Shard(d), _StridedShard(d, split_factor=s), "
      "Partial(op)",
      text.substr(0, 80)));
}

Status Validate(const DeviceMesh& mesh, std::uint32_t rank_count) {
  std::uint64_t product = 1;
  for (const DeviceMesh::Axis& axis : mesh.axes) {
    if (axis.size == 0) return Malformed(fmt::format("mesh: axis '{}' has size 0", axis.name));
    product *= axis.size;
    if (product > kMaxRanks) return Malformed(fmt::format("mesh: more than {} ranks", kMaxRanks));
  }
  if (mesh.rank_ids.empty()) {
    if (product <= rank_count) return {};
    return Malformed(fmt::format("mesh: {} ranks, the job has {}", product, rank_count));
  }
  if (mesh.rank_ids.size() != product) {
    return Malformed(
        fmt::format("rank_ids: {} ids for a mesh of {} ranks", mesh.rank_ids.size(), product));
  }
  std::vector<std::uint32_t> sorted = mesh.rank_ids;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) return Malformed(fmt::format("rank_ids: {} appears twice", *twice));
  if (sorted.back() >= rank_count)
    return Malformed(fmt::format("rank_ids: {}, the job has {} ranks", sorted.back(), rank_count));
  return {};
}

Result<std::vector<Box>> BoxesAt(const DeviceMesh& mesh, std::span<const Placement> placements,
                                 const Shape& shape, std::span<const std::uint32_t> coordinate,
                                 PartialPolicy partial) {
  TB_CHECK(coordinate.size() == mesh.axes.size());
  TB_RETURN_IF_ERROR(CheckPlacements(mesh, placements, shape, partial));
  std::array<IntervalList, kMaxDims> dims;
  for (int d = 0; d < shape.rank(); ++d) Append(&dims[static_cast<std::size_t>(d)], {0, shape[d]});
  for (std::size_t a = 0; a < placements.size(); ++a) {
    const Placement& placement = placements[a];
    if (placement.kind != Placement::Kind::kShard &&
        placement.kind != Placement::Kind::kStridedShard)
      continue;
    auto& list = dims[static_cast<std::size_t>(NormalDim(placement.dim, shape.rank()))];
    TB_ASSIGN_OR_RETURN(list, Keep(placement, list, mesh.axes[a].size, coordinate[a]));
  }
  return BoxesOf(std::span(dims).first(static_cast<std::size_t>(shape.rank())));
}

Result<Holding> Resolve(const DeviceMesh& mesh, std::span<const Placement> placements,
                        const Shape& shape, std::uint32_t rank_count, PartialPolicy partial) {
  TB_RETURN_IF_ERROR(Validate(mesh, rank_count));
  TB_RETURN_IF_ERROR(CheckPlacements(mesh, placements, shape, partial));
  std::uint32_t positions = 1;
  for (const DeviceMesh::Axis& axis : mesh.axes) positions *= axis.size;
  TB_RETURN_IF_ERROR(CheckWork(placements, shape, positions));
  Holding holding;
  std::size_t box_count = 0;
  std::vector<std::uint32_t> coordinate(mesh.axes.size());
  for (std::uint32_t p = 0; p < positions; ++p) {
    std::uint32_t rest = p;
    for (std::size_t a = mesh.axes.size(); a-- > 0;) {
      coordinate[a] = rest % mesh.axes[a].size;
      rest /= mesh.axes[a].size;
    }
    TB_ASSIGN_OR_RETURN(std::vector<Box> boxes,
                        BoxesAt(mesh, placements, shape, coordinate, partial));
    const std::uint32_t rank = mesh.rank_ids.empty() ? p : mesh.rank_ids[p];
    box_count += boxes.size();
    if (box_count > kMaxBoxesPerHolding)
      return Malformed(fmt::format("placements: more than {} boxes in all", kMaxBoxesPerHolding));
    if (!boxes.empty()) holding.ranks.push_back({rank, std::move(boxes)});
  }
  std::sort(holding.ranks.begin(), holding.ranks.end(),
            [](const RankBoxes& a, const RankBoxes& b) { return a.rank < b.rank; });
  return holding;
}

}  // namespace tensorbus
