#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "tensorbus/types/strided.h"

namespace tensorbus::testing {

using Random = std::mt19937_64;

/// Uniform in [lo, hi]; the same on every standard library.
inline std::uint64_t Pick(Random& random, std::uint64_t lo, std::uint64_t hi) {
  return lo + random() % (hi - lo + 1);
}

/// A block together with the memory it lies in. Moving it keeps the block valid.
struct PlacedBlock {
  std::vector<std::byte> memory;
  StridedBlock block;
};

inline void FillRandom(Random& random, std::vector<std::byte>& memory) {
  constexpr std::size_t kWord = sizeof(Random::result_type);
  for (std::size_t i = 0; i < memory.size(); i += kWord) {
    const Random::result_type word = random();
    std::memcpy(&memory[i], &word, std::min(kWord, memory.size() - i));
  }
}

/// A box of a made-up tensor, as a block without memory: extents, item size, key and the place in
/// the tensor's row-major stream. Has at most about `bytes_max` bytes; sometimes none of extent
/// > 1.
inline StridedBlock RandomBox(Random& random, std::uint64_t bytes_max) {
  StridedBlock block;
  block.rank = static_cast<std::uint8_t>(Pick(random, 0, 5));
  block.item_bytes = std::array{1U, 2U, 4U, 8U}[Pick(random, 0, 3)];
  block.key = {.a = random(), .b = random()};
  std::uint64_t left = std::max<std::uint64_t>(1, bytes_max / block.item_bytes);
  std::array<std::uint64_t, kMaxDims> shape = {};
  std::array<std::uint64_t, kMaxDims> corner = {};
  for (std::size_t d = block.rank; d-- > 0;) {
    const std::uint64_t most = Pick(random, 0, 2) == 0 ? left : std::min<std::uint64_t>(left, 9);
    block.extents[d] = Pick(random, 1, most);
    left /= block.extents[d];
    const bool whole = Pick(random, 0, 1) == 0;
    corner[d] = whole ? 0 : Pick(random, 0, 5);
    shape[d] = corner[d] + block.extents[d] + (whole ? 0 : Pick(random, 0, 5));
  }
  std::uint64_t stride = block.item_bytes;
  for (std::size_t d = block.rank; d-- > 0;) {
    block.stream_strides[d] = stride;
    block.stream_offset += corner[d] * stride;
    stride *= shape[d];
  }
  return block;
}

/// Gives the box memory of its own: dimensions in any order, with gaps, at any alignment.
inline PlacedBlock Place(Random& random, StridedBlock block) {
  std::array<std::size_t, kMaxDims> order = {};
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto rank = static_cast<std::size_t>(block.rank);
  if (Pick(random, 0, 1) == 0) {
    for (std::size_t i = rank; i > 1; --i) std::swap(order[i - 1], order[Pick(random, 0, i - 1)]);
  }
  std::uint64_t stride = block.item_bytes;
  for (std::size_t i = rank; i-- > 0;) {
    const std::size_t d = order[i];
    if (Pick(random, 0, 3) == 0) stride += Pick(random, 1, 3) * block.item_bytes;
    block.strides[d] = stride;
    stride *= block.extents[d];
  }
  PlacedBlock placed;
  const std::uint64_t lead = Pick(random, 0, 70);
  placed.memory.resize(lead + stride + 70);
  FillRandom(random, placed.memory);
  block.base = placed.memory.data() + lead;
  placed.block = block;
  return placed;
}

/// Calls `visit(memory address, stream position)` for every byte, in row-major order: the slow and
/// obvious walk.
template <typename Visit>
void ForEachByte(const StridedBlock& block, const Visit& visit) {
  std::array<std::uint64_t, kMaxDims> index = {};
  for (std::uint64_t n = block.elements(); n != 0; --n) {
    std::byte* at = block.base;
    std::uint64_t stream = block.stream_offset;
    for (std::size_t d = 0; d < block.rank; ++d) {
      at += index[d] * block.strides[d];
      stream += index[d] * block.stream_strides[d];
    }
    for (std::uint32_t j = 0; j < block.item_bytes; ++j) visit(at + j, stream + j);
    for (std::size_t d = block.rank; d-- > 0;) {
      if (++index[d] < block.extents[d]) break;
      index[d] = 0;
    }
  }
}

/// The block's bytes in row-major order, the slow way.
inline std::vector<std::byte> BytesOf(const StridedBlock& block) {
  std::vector<std::byte> out;
  out.reserve(block.bytes());
  ForEachByte(block, [&](const std::byte* at, std::uint64_t) { out.push_back(*at); });
  return out;
}

/// The memory as it must look once `bytes` were written into the block and nothing else.
inline std::vector<std::byte> WithBytes(const PlacedBlock& placed,
                                        const std::vector<std::byte>& bytes) {
  std::vector<std::byte> memory = placed.memory;
  std::size_t next = 0;
  ForEachByte(placed.block, [&](const std::byte* at, std::uint64_t) {
    memory[static_cast<std::size_t>(at - placed.memory.data())] = bytes[next++];
  });
  return memory;
}

}  // namespace tensorbus::testing
