#pragma once

#include "tensorbus/kernels/digest.h"
#include "tests/testing/random_blocks.h"

namespace tensorbus::kernels {

/// The digest of a block byte by byte, as the formula is written.
inline DigestSum SlowSum(const StridedBlock& block) {
  DigestSum sum;
  testing::ForEachByte(block, [&](const std::byte* at, std::uint64_t stream) {
    AddDigestReference(sum, block.key, at, stream, 1);
  });
  return sum;
}

}  // namespace tensorbus::kernels
