#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tensorbus/transport/landing.h"
#include "tensorbus/transport/pull_state.h"
#include "tensorbus/transport/stream_map.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// The block as if its row-major bytes lay one after the other and byte `first` of them at
/// `packed`. Only the part that really lies there may be touched.
StridedBlock PackedBlock(const StridedBlock& block, const std::byte* packed, std::uint64_t first);

/// Sum of a part whose bytes lie packed at `packed`.
DigestSum DigestPacked(const StridedBlock& block, kernels::ByteRange range,
                       const std::byte* packed);

/// Sums of whole blocks of foreign memory, in order. Many small blocks take one call.
Result<std::vector<DigestSum>> DigestForeign(ForeignMemory& memory,
                                             std::span<const StridedBlock> blocks,
                                             TimePoint deadline);

/// Fills `out` with parts of an end's blocks, one after the other, wherever they lie.
Status ReadParts(const RouteEnd& end, std::span<const BlockPart> parts, std::span<std::byte> out,
                 TimePoint deadline);

/// What the landing of several parts has in common.
struct LandingContext {
  const RouteKey& key;
  const TargetEnd& target;
  Proof proof = Proof::kReadback;
  TimePoint deadline;
  kernels::StoreKind store = kernels::StoreKind::kPlain;
  const LandingHook& hook;
};

/// Called with each part that landed; of a block it may be several.
using OnLanded = std::function<void(std::uint32_t block, const Landing& landing)>;

/// LandFromMemory() for parts of which source or target, or both, are foreign.
///
/// Errors: those of ForeignMemory; parts told to `landed` before are in place.
Status LandForeign(const LandingContext& context, const RouteEnd& source,
                   std::span<const BlockPart> parts, const OnLanded& landed);

/// Lands parts of a route whose two ends this process holds, whatever memory they are in, and tells
/// the pull about each. A failure is the pull's failure.
void LandParts(PullState& pull, const RouteEnd& source, std::span<const BlockPart> parts,
               kernels::StoreKind store, const LandingHook& hook);

/// A part of one pull of several that share a pass over their source.
struct JointPart {
  PullState* pull = nullptr;
  const RouteEnd* source = nullptr;
  BlockPart part;
};

/// LandParts() for one part of each of several pulls with both ends in this process's memory and no
/// aliases, at most kernels::kJointMax, in one pass over their sources.
void LandJointly(std::span<const JointPart> parts, kernels::StoreKind store,
                 const LandingHook& hook);

/// Writes parts that lie packed in `packed` to all their places in the foreign target.
Status WritePacked(const TargetEnd& target, std::span<const BlockPart> parts,
                   std::span<const std::byte> packed, TimePoint deadline);

/// What is left to do after WritePacked(): reads every place back as the proof asks, through
/// `scratch` (at least as long as all parts together). `sent` has the source's sum of each part.
Status LandWritten(const LandingContext& context, std::span<const BlockPart> parts,
                   std::span<const DigestSum> sent, std::span<std::byte> scratch,
                   const OnLanded& landed);

}  // namespace tensorbus::transport
