#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensorbus/types/dtype.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::kernels {

/// Key of the digest of one tensor's content: XXH3-128 of u32 length + channel, u32 length + name,
/// u8 dtype code (little-endian); a is the low half. Neither version nor box go in, so equal
/// content has an equal digest.
DigestKey MakeDigestKey(std::string_view channel, std::string_view tensor, DType dtype);

/// Adds `count` bytes at `memory`, which stand at byte `stream_offset` of the tensor's row-major
/// stream. The fastest kernel of this machine.
void AddDigest(DigestSum& sum, const DigestKey& key, const std::byte* memory,
               std::uint64_t stream_offset, std::size_t count);

/// The definition, one byte at a time; for tests.
void AddDigestReference(DigestSum& sum, const DigestKey& key, const std::byte* memory,
                        std::uint64_t stream_offset, std::size_t count);

/// A part of a block's row-major bytes. It may begin and end anywhere, also inside an element.
struct ByteRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// The sum of a whole block, whatever its strides.
DigestSum DigestBlock(const StridedBlock& block);
/// The sum of a part of it: the parts of any cut add up to DigestBlock().
DigestSum DigestRange(const StridedBlock& block, ByteRange range);

}  // namespace tensorbus::kernels
