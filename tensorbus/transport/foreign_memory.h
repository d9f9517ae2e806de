#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tensorbus/base/clock.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/strided.h"

namespace tensorbus::transport {

/// Bytes [first, first + count) of a block's row-major bytes. Borrows the block.
struct ForeignPart {
  const StridedBlock* block = nullptr;
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

/// Bytes of this process through which those of a ForeignMemory pass; whoever lent them gets them
/// back when it dies. Move-only.
struct ForeignStage {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner;

  ForeignStage(std::span<std::byte> lent, std::shared_ptr<void> lender)
      : bytes(lent), owner(std::move(lender)) {}
  ForeignStage(ForeignStage&&) = default;
  ForeignStage& operator=(ForeignStage&&) = default;
  ForeignStage(const ForeignStage&) = delete;
  ForeignStage& operator=(const ForeignStage&) = delete;
};

/// Memory that this process cannot address: reads and writes parts of blocks for it. The blocks'
/// `base` means something to the implementation only.
///
/// Give many small parts in one call: a call costs a system call or a round trip. Every byte held
/// on the way is counted in a StagingBudget, by the implementation.
///
/// Threads: thread-safe. All calls block, at most until `deadline`.
///
/// Errors of all: kUnavailable/kPeerLost when the memory's owner is gone; kDeadlineExceeded, with
/// kMissingRank when the owner does not answer; kPermissionDenied.
class ForeignMemory {
 public:
  virtual ~ForeignMemory() = default;

  /// Bytes of every stage.
  virtual std::uint64_t stage_bytes() const = 0;
  /// Lends a stage; waits until one is free. Whoever holds one may read and write memories (this
  /// one too), but borrow no second one: all could wait for each other.
  virtual Result<ForeignStage> Borrow(TimePoint deadline) = 0;

  /// Fills `out` with the parts' bytes, one part after the other. Cheapest into a stage of its own.
  virtual Status Read(std::span<const ForeignPart> parts, std::span<std::byte> out,
                      TimePoint deadline) = 0;
  /// The inverse. After a failure any of the parts may have been written.
  virtual Status Write(std::span<const ForeignPart> parts, std::span<const std::byte> in,
                       TimePoint deadline) = 0;
};

}  // namespace tensorbus::transport
