#include "agent/binding.h"

#include <algorithm>
#include <fmt/format.h>
#include <map>

#include "agent/registered_place.h"
#include "tensorbus/kernels/digest.h"

namespace tensorbus::agent {
namespace {

/// Where the box's first element starts in the piece's segment.
std::uint64_t OffsetOf(const Box& box, const Piece& piece) {
  std::uint64_t offset = piece.offset;
  for (int d = 0; d < box.rank(); ++d) {
    offset += (box[d].lo - piece.box[d].lo) * piece.strides[static_cast<std::size_t>(d)];
  }
  return offset;
}

/// The box whose elements stand where the block says.
Box BoxOf(const StridedBlock& block) {
  std::array<Range, kMaxDims> ranges = {};
  std::uint64_t offset = block.stream_offset;
  for (std::size_t d = 0; d < block.rank; ++d) {
    const std::uint64_t lo = offset / block.stream_strides[d];
    offset %= block.stream_strides[d];
    ranges[d] = {.lo = lo, .hi = lo + block.extents[d]};
  }
  return Box(std::span<const Range>(ranges).first(block.rank));
}

Status NotHeld(const TensorSpec& spec, std::uint32_t rank, const Box& box) {
  return {Code::kFailedPrecondition,
          fmt::format("rank {} registered no memory for {}{}, which its layout says it holds", rank,
                      spec.name, box.ToString()),
          Reason::kLayoutMismatch};
}

/// Pairs what is written, the block and its aliases, with where the registration says it belongs.
Status AddReadback(const std::vector<PlacedBlock>& registered, const TensorSpec& spec,
                   const CopyOp& op, std::size_t first_alias, BoundRoute* route) {
  if (registered.size() != 1 + route->aliases.size() - first_alias) {
    return {Code::kInternal,
            fmt::format("rank {} registered {}{} in {} places, {} would be written", op.target,
                        spec.name, op.box.ToString(), registered.size(),
                        1 + route->aliases.size() - first_alias),
            Reason::kPlanMismatch};
  }
  route->readback.push_back(registered[0]);
  for (std::size_t i = 1; i < registered.size(); ++i) {
    route->aliases[first_alias + i - 1].readback = registered[i];
  }
  return {};
}

// The first piece that holds the box; later ones with the same box are its aliases.
Status BindOp(const PieceIndex& pieces, const RegisteredPlaces& registered, const TensorSpec& spec,
              std::int64_t tensor, const CopyOp& op, RouteSide side, BoundRoute* route) {
  const std::uint32_t rank = side == RouteSide::kSource ? op.source : op.target;
  if (tensor < 0) return NotHeld(spec, rank, op.box);
  const auto own = static_cast<std::uint32_t>(tensor);
  const Registration& registration = pieces.registration();
  const Piece* first = nullptr;
  const auto index = static_cast<std::uint32_t>(route->blocks.size());
  const std::size_t first_alias = route->aliases.size();
  for (const std::uint32_t number : pieces.PiecesOf(own)) {
    const Piece& piece = registration.pieces[number];
    if (first == nullptr) {
      if (!piece.box.Contains(op.box)) continue;
      first = &piece;
      route->blocks.push_back(pieces.Place(number, op.box));
      route->tensors.push_back(op.tensor);
      route->bytes += route->blocks.back().block.bytes();
      route->boxes.Add(op.tensor, BoxOf(route->blocks.back().block));
    } else if (side == RouteSide::kTarget && piece.box == first->box) {
      route->aliases.push_back(
          {.block = index, .place = pieces.Place(number, op.box), .readback = {}});
    }
    if (side == RouteSide::kSource && first != nullptr) break;
  }
  if (first == nullptr) return NotHeld(spec, rank, op.box);
  if (side == RouteSide::kSource) return {};
  return AddReadback(registered.Find(own, op.box, pieces.KeyOf(own)), spec, op, first_alias, route);
}

}  // namespace

PieceIndex::PieceIndex(Registration registration, std::string_view channel)
    : registration_(std::move(registration)), by_tensor_(registration_.tensors.size()) {
  keys_.reserve(registration_.tensors.size());
  by_name_.reserve(registration_.tensors.size());
  for (const TensorSpec& spec : registration_.tensors) {
    by_name_.emplace(spec.name, static_cast<std::uint32_t>(keys_.size()));
    keys_.push_back(kernels::MakeDigestKey(channel, spec.name, spec.dtype));
  }
  for (std::uint32_t i = 0; i < registration_.pieces.size(); ++i) {
    const Piece& piece = registration_.pieces[i];
    by_tensor_[piece.tensor].push_back(i);
    piece_bytes_ += piece.box.volume() * ItemBytes(registration_.tensors[piece.tensor].dtype);
  }
}

std::int64_t PieceIndex::TensorIndex(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? -1 : static_cast<std::int64_t>(found->second);
}

std::string PieceIndex::NameOf(std::uint32_t piece) const {
  const Piece& named = registration_.pieces[piece];
  return registration_.tensors[named.tensor].name + named.box.ToString();
}

PlacedBlock PieceIndex::Place(std::uint32_t number, const Box& box) const {
  const Piece& piece = registration_.pieces[number];
  const TensorSpec& spec = registration_.tensors[piece.tensor];
  PlacedBlock placed;
  placed.piece = number;
  placed.segment = piece.segment;
  placed.offset = OffsetOf(box, piece);
  StridedBlock& block = placed.block;
  block.rank = static_cast<std::uint8_t>(box.rank());
  block.item_bytes = ItemBytes(spec.dtype);
  block.key = keys_[piece.tensor];
  std::uint64_t stream_stride = block.item_bytes;
  for (int d = box.rank() - 1; d >= 0; --d) {
    const auto at = static_cast<std::size_t>(d);
    block.extents[at] = box[d].size();
    block.strides[at] = piece.strides[at];
    block.stream_strides[at] = stream_stride;
    block.stream_offset += box[d].lo * stream_stride;
    stream_stride *= spec.shape[d];
  }
  return placed;
}

transport::RouteEnd BoundRoute::At(std::span<std::byte* const> bases) const {
  transport::RouteEnd end;
  end.blocks.reserve(blocks.size());
  for (const PlacedBlock& block : blocks) end.blocks.push_back(block.At(bases));
  end.readback.reserve(readback.size());
  for (const PlacedBlock& block : readback) end.readback.push_back(block.At(bases));
  end.aliases.reserve(aliases.size());
  for (const Alias& alias : aliases) {
    end.aliases.push_back({.block = alias.block,
                           .place = alias.place.At(bases),
                           .readback = alias.readback.At(bases)});
  }
  return end;
}

std::uint64_t BoundRoute::Located(std::span<const DigestSum> sums) const {
  std::uint64_t located = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    located += (std::uint64_t{tensors[i]} + 1) * sums[i].a;
  }
  return located;
}

Result<std::vector<BoundRoute>> BindRoutes(const PieceIndex& pieces, const planner::Plan& plan,
                                           const JobLayout& target, std::uint32_t rank,
                                           RouteSide side) {
  const RegisteredPlaces registered(pieces.registration());
  std::vector<std::int64_t> own_index(target.tensors.size(), -2);  // -2: not looked up yet
  std::map<std::uint32_t, BoundRoute> routes;
  for (const planner::Route& planned : plan.routes) {
    if ((side == RouteSide::kSource ? planned.source : planned.target) != rank) continue;
    BoundRoute& route = routes[side == RouteSide::kSource ? planned.target : planned.source];
    route.source_rank = planned.source;
    route.target_rank = planned.target;
    for (const CopyOp& op : planner::OpsOf(plan, planned)) {
      const TensorSpec& spec = target.tensors[op.tensor].spec;
      std::int64_t& index = own_index[op.tensor];
      if (index == -2) index = pieces.TensorIndex(spec.name);
      TB_RETURN_IF_ERROR(BindOp(pieces, registered, spec, index, op, side, &route));
    }
  }
  std::vector<BoundRoute> bound;
  bound.reserve(routes.size());
  for (auto& [other, route] : routes) bound.push_back(std::move(route));
  return bound;
}

std::uint64_t BytesOf(const JobLayout& layout, std::uint32_t rank) {
  std::uint64_t bytes = 0;
  for (const JobLayout::Tensor& tensor : layout.tensors) {
    const std::vector<RankBoxes>& ranks = layout.HoldingOf(tensor).ranks;
    const auto held =
        std::lower_bound(ranks.begin(), ranks.end(), rank,
                         [](const RankBoxes& entry, std::uint32_t r) { return entry.rank < r; });
    if (held == ranks.end() || held->rank != rank) continue;
    for (const Box& box : held->boxes) bytes += box.volume() * ItemBytes(tensor.spec.dtype);
  }
  return bytes;
}

}  // namespace tensorbus::agent
