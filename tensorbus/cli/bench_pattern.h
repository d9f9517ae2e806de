#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

// What the tensors of a benchmark contain: a closed form of (version, tensor name, global index),
// cheap enough to rewrite every tensor before every refresh and to compare every element after it.
namespace tensorbus::cli {

/// One box of one tensor in a rank's arena, row-major and without gaps.
struct ArenaPiece {
  std::uint32_t tensor = 0;  ///< index into the job's tensors
  Box box;
  std::uint64_t offset = 0;  ///< of its first byte
};

/// Where the boxes of one rank lie in its arena: in the order of the job's tensors, each at a
/// multiple of 64 bytes. The same for us and for every peer.
struct RankArena {
  std::vector<ArenaPiece> pieces;
  std::uint64_t bytes = 0;  ///< a multiple of 4 KiB, never 0
};

RankArena PlaceRank(const JobLayout& layout, std::uint32_t rank);

/// Writes every element of the arena with what it is in `version`.
///   base  arena.bytes bytes
void FillArena(const JobLayout& layout, const RankArena& arena, std::uint64_t version,
               std::byte* base);

/// Compares every element of the arena with what it is in `version`. Error: kDataLoss naming
/// tensor, index and both values of the first that differs.
Status CheckArena(const JobLayout& layout, const RankArena& arena, std::uint64_t version,
                  const std::byte* base);

/// The two for one stretch of `count` elements of `item_bytes` (1, 2, 4 or 8) each, the first of
/// which has the global linear index `first`. CheckRow() gives the first one that differs, counted
/// from 0.
void FillRow(std::byte* row, std::uint64_t first, std::uint64_t count, std::uint32_t item_bytes,
             std::uint32_t key);
std::optional<std::uint64_t> CheckRow(const std::byte* row, std::uint64_t first,
                                      std::uint64_t count, std::uint32_t item_bytes,
                                      std::uint32_t key);

/// Keys the closed form for a tensor of a version: no two versions in a row agree anywhere but by
/// chance.
std::uint32_t PatternKey(std::uint64_t version, std::string_view tensor);

}  // namespace tensorbus::cli
