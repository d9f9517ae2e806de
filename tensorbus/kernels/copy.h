#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "tensorbus/kernels/digest.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::kernels {

/// Sums that a checked copy made: of the bytes as loaded from the source, and as read back from the
/// target.
struct CopySums {
  DigestSum source;
  DigestSum target;
};

/// How the target is written. Streaming stores pass by the cache: right when the whole transfer is
/// larger than the last-level cache, slower when it is small.
enum class StoreKind {
  kAuto,    ///< streaming from 16 MiB on
  kPlain,   ///< through the cache
  kStream,  ///< past it; complete and ordered when the call returns
};

/// Copies a block onto another of the same extents and item size, in one pass, whatever the strides
/// of either. Blocks must not overlap in memory.
void CopyBlock(const StridedBlock& source, const StridedBlock& target);

/// CopyBlock that also digests the source bytes it loads, at the source's stream positions (proof
/// `stream`).
DigestSum CopyBlockDigest(const StridedBlock& source, const StridedBlock& target);

/// CopyBlock that digests the loaded source and, group by group while it is in cache, the target
/// read back through the target's own strides and stream positions (proof `readback`).
CopySums CopyBlockReadback(const StridedBlock& source, const StridedBlock& target);

/// The same three for a part of the blocks' row-major bytes. The parts of a cut may be done in any
/// order and on any thread; their sums add up to the whole block's.
void CopyRange(const StridedBlock& source, const StridedBlock& target, ByteRange range,
               StoreKind store = StoreKind::kAuto);
DigestSum CopyRangeDigest(const StridedBlock& source, const StridedBlock& target, ByteRange range,
                          StoreKind store = StoreKind::kAuto);
/// `check` says where the written bytes are read back: the target as somebody else computed it, or
/// the target itself.
CopySums CopyRangeReadback(const StridedBlock& source, const StridedBlock& target,
                           const StridedBlock& check, ByteRange range);

/// The part [first, first + count) of the block's row-major bytes, packed or unpacked. Any cut is
/// fine.
void PackRange(const StridedBlock& block, std::uint64_t first, std::span<std::byte> out);
void UnpackRange(std::span<const std::byte> in, std::uint64_t first, const StridedBlock& block);

/// Length in bytes of the longest stretch that is contiguous in the block's memory, over and over.
std::uint64_t RunBytes(const StridedBlock& block);
/// The same of what is contiguous in the memory of both.
std::uint64_t RunBytes(const StridedBlock& source, const StridedBlock& target);

/// Name of the instruction set the kernels were chosen for: "avx512", "avx2" or "portable".
std::string_view InstructionSet();

}  // namespace tensorbus::kernels
