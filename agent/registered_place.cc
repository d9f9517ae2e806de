#include "agent/registered_place.h"

#include <array>

namespace tensorbus::agent {
namespace {

/// One element of a tensor, by its indices.
using Element = std::array<std::uint64_t, kMaxDims>;

/// Where the element starts in the piece's segment.
std::uint64_t ByteInSegment(const Piece& piece, const Element& element) {
  std::uint64_t byte = piece.offset;
  for (std::size_t d = 0; d < static_cast<std::size_t>(piece.box.rank()); ++d) {
    byte += piece.strides[d] * (element[d] - piece.box[static_cast<int>(d)].lo);
  }
  return byte;
}

/// Where the element starts in the tensor's row-major stream.
std::uint64_t ByteInStream(const TensorSpec& spec, const Element& element) {
  std::uint64_t row_major = 0;
  for (int d = 0; d < spec.shape.rank(); ++d) {
    row_major = row_major * spec.shape[d] + element[static_cast<std::size_t>(d)];
  }
  return row_major * ItemBytes(spec.dtype);
}

}  // namespace

PlacedBlock RegisteredPlace(const Registration& registration, std::uint32_t number, const Box& box,
                            const DigestKey& key) {
  const Piece& piece = registration.pieces[number];
  const TensorSpec& spec = registration.tensors[piece.tensor];
  Element corner = {};
  for (int d = 0; d < box.rank(); ++d) corner[static_cast<std::size_t>(d)] = box[d].lo;
  PlacedBlock placed;
  placed.piece = number;
  placed.segment = piece.segment;
  placed.offset = ByteInSegment(piece, corner);
  StridedBlock& block = placed.block;
  block.rank = static_cast<std::uint8_t>(box.rank());
  block.item_bytes = ItemBytes(spec.dtype);
  block.key = key;
  block.stream_offset = ByteInStream(spec, corner);
  for (std::size_t d = 0; d < block.rank; ++d) {
    Element next = corner;
    ++next[d];
    block.extents[d] = box[static_cast<int>(d)].size();
    block.strides[d] = ByteInSegment(piece, next) - placed.offset;
    block.stream_strides[d] = ByteInStream(spec, next) - block.stream_offset;
  }
  return placed;
}

RegisteredPlaces::RegisteredPlaces(const Registration& registration)
    : registration_(registration), of_tensor_(registration.tensors.size()) {
  for (std::size_t i = 0; i < registration.pieces.size(); ++i) {
    of_tensor_[registration.pieces[i].tensor].push_back(static_cast<std::uint32_t>(i));
  }
}

std::vector<PlacedBlock> RegisteredPlaces::Find(std::uint32_t tensor, const Box& box,
                                                const DigestKey& key) const {
  std::vector<PlacedBlock> places;
  for (const std::uint32_t number : of_tensor_[tensor]) {
    const Piece& piece = registration_.pieces[number];
    if (piece.box.Contains(box)) places.push_back(RegisteredPlace(registration_, number, box, key));
  }
  return places;
}

}  // namespace tensorbus::agent
