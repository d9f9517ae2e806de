#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "agent/binding.h"
#include "agent/bucket_channel.h"
#include "agent/cma_memory.h"
#include "agent/local_socket.h"
#include "agent/memory_access.h"
#include "agent/stage_pool.h"
#include "tensorbus/base/status.h"
#include "tensorbus/transport/staging_budget.h"

namespace tensorbus::agent {

/// What all private memory of one agent shares. Thread-safe.
struct PrivateMemoryPlant {
  std::shared_ptr<transport::StagingBudget> budget;
  std::shared_ptr<StagePool> stages;
  /// How long a worker may take to serve one order of bucket mode.
  Nanos bucket_patience = std::chrono::seconds(20);
};

/// A worker whose memory is to be reached.
struct PrivateOwner {
  PeerProcess peer;
  std::string name;  ///< for messages: the rank
  bool writable = false;
  std::uint8_t wanted_mode = 0;  ///< 0: the best that works; or a MemoryMode
  std::shared_ptr<BucketChannel> channel;
};

/// Memory that this process cannot address and has not found a way to reach yet: it knows how long
/// its segments are and where they begin in their owner, and nothing of it may be used.
std::shared_ptr<const MemoryAccess> AnnouncedMemory(std::vector<PrivateSegment> segments);

/// Finds the way to a worker's private memory: what the worker asked for, else in place (cma) if
/// the kernel allows it, else through buckets. Tries it, so it blocks; for a worker thread, while
/// the worker waits for its registration's answer.
///
/// Errors: kFailedPrecondition/kUnsupported when the mode asked for does not work, and why;
/// kInvalidArgument/kUnsupported for kMapped; those of CmaMemory and BucketMemory.
Result<std::shared_ptr<const MemoryAccess>> OpenPrivateMemory(
    const PrivateMemoryPlant& plant, const PrivateOwner& owner, const MemoryAccess& announced,
    std::shared_ptr<const PieceIndex> pieces);

}  // namespace tensorbus::agent
