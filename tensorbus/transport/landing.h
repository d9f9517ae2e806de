#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "tensorbus/kernels/copy.h"
#include "tensorbus/transport/transport.h"

namespace tensorbus::transport {

/// Called between the moment a part of a block was written to its place and the moment it is read
/// back: where tests damage memory. Null in production. Runs on a thread of the transport; `place`
/// is the block as the copy addressed it.
using LandingHook = std::function<void(const RouteKey& key, std::uint32_t block,
                                       const StridedBlock& place, kernels::ByteRange range)>;

/// Whether what was written is read again and digested.
inline bool ReadsBack(Proof proof) {
  return proof >= Proof::kReadback;
}

/// The target end of a route with its aliases sorted by block.
class TargetEnd {
 public:
  explicit TargetEnd(RouteEnd end);

  const RouteEnd& end() const { return end_; }
  const StridedBlock& block(std::uint32_t index) const { return end_.blocks[index]; }
  /// Where block `index` is read back.
  const StridedBlock& check(std::uint32_t index) const {
    return end_.readback.empty() ? end_.blocks[index] : end_.readback[index];
  }
  std::span<const RouteEnd::Alias> aliases(std::uint32_t index) const;

 private:
  RouteEnd end_;
};

/// What one part of one block looked like on both sides.
struct Landing {
  DigestSum source;
  DigestSum target;  ///< equal to `source` below kReadback
  /// All places, aliases included, were read back as they were sent (always true below kReadback).
  bool intact = true;
};

/// Copies a part of a block that this process holds on both sides to all its places, and reads back
/// what `proof` asks for.
Landing LandFromMemory(const RouteKey& key, const StridedBlock& source, const TargetEnd& target,
                       std::uint32_t block, kernels::ByteRange range, Proof proof,
                       kernels::StoreKind store, const LandingHook& hook);

/// The same for a part that already arrived in the target's block: writes the aliases from there
/// and reads back. `sent` is the source's sum.
Landing LandInPlace(const RouteKey& key, const DigestSum& sent, const TargetEnd& target,
                    std::uint32_t block, kernels::ByteRange range, Proof proof,
                    const LandingHook& hook);

}  // namespace tensorbus::transport
