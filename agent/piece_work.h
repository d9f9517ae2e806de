#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "agent/binding.h"
#include "agent/memory_access.h"
#include "agent/work_pool.h"
#include "tensorbus/base/status.h"

namespace tensorbus::agent {

/// Work over all pieces of a rank, cut into equal shares for the work pool. `done` runs on
/// `executor`, never inside the call; everything passed in is kept alive until then.
struct PieceWork {
  WorkPool& pool;
  Executor& executor;
  /// Memory that is not addressable and is not served by then fails the work.
  TimePoint deadline = TimePoint::max();
};

/// Copies every piece from one memory to another of the same segments, reading each byte back
/// through the target's addresses.
///
/// Errors: kDataLoss/kChecksumMismatch naming the piece; ForeignMemory's. The target is then partly
/// written.
void CopyPieces(const PieceWork& work, std::shared_ptr<const PieceIndex> pieces,
                std::shared_ptr<const MemoryAccess> source,
                std::shared_ptr<const MemoryAccess> target, std::function<void(Status)> done);

/// Digests every piece of a memory, in piece order. Errors: ForeignMemory's.
void DigestPieces(const PieceWork& work, std::shared_ptr<const PieceIndex> pieces,
                  std::shared_ptr<const MemoryAccess> memory,
                  std::function<void(Result<std::vector<DigestSum>>)> done);

/// Digests blocks that lie in `memory`, in order.
void DigestBlocks(const PieceWork& work, std::shared_ptr<const std::vector<PlacedBlock>> blocks,
                  std::shared_ptr<const MemoryAccess> memory,
                  std::function<void(Result<std::vector<DigestSum>>)> done);

/// Cuts a block along its first dimension that has more than one row into parts of at most
/// `part_bytes`, as far as that dimension goes. The parts' digests add up to the block's.
std::vector<PlacedBlock> CutBlock(const PlacedBlock& block, std::uint64_t part_bytes);

}  // namespace tensorbus::agent
