#pragma once

#include <cstdint>
#include <vector>

#include "agent/binding.h"
#include "tensorbus/types/piece.h"

namespace tensorbus::agent {

/// Where `box` lies according to the registered piece that holds it: what a copy is read back
/// through and memory is digested by. `key` goes into the block.
///
/// It shares no arithmetic with PieceIndex::Place(), which the copy goes by: it takes the places of
/// single elements from the piece and derives the block's strides from how far these are apart.
PlacedBlock RegisteredPlace(const Registration& registration, std::uint32_t piece, const Box& box,
                            const DigestKey& key);

/// Finds the pieces that hold a box by walking the registration. Immutable; borrows the
/// registration, which must be valid.
class RegisteredPlaces {
 public:
  explicit RegisteredPlaces(const Registration& registration);

  /// The box in every piece that holds it whole, in piece order: its place, then its aliases.
  std::vector<PlacedBlock> Find(std::uint32_t tensor, const Box& box, const DigestKey& key) const;

 private:
  const Registration& registration_;
  std::vector<std::vector<std::uint32_t>> of_tensor_;
};

}  // namespace tensorbus::agent
