#pragma once

#include <memory>
#include <string>

#include "agent/binding.h"
#include "agent/memory_access.h"
#include "tensorbus/base/status.h"
#include "worker_shim/wire.h"

namespace tensorbus::agent {

/// What checking a registration and touching its memory brought.
struct CheckedRegistration {
  std::shared_ptr<const PieceIndex> pieces;
  std::shared_ptr<const MemoryAccess> memory;  ///< private memory, and how it is reached; else null
  std::shared_ptr<const MemoryAccess> shadow;  ///< consumers with FlipMode::kShadow
  std::string layout;                          ///< Serialize(RankLayout)
  double register_seconds = 0;                 ///< checks and metadata
  double prefault_seconds = 0;                 ///< touching target pages, or the source's mappings
};

/// Checks a worker's registration against the memory it attached, makes the shadow if its flip mode
/// wants one, and touches the pages that sessions will use (the worker touches those of private
/// memory itself). For a worker thread.
///
/// Errors: kInvalidArgument/kMalformed, kOverlap and the like from the checks, naming tensor and
/// box; kResourceExhausted/kOutOfMemory with the remedy.
Result<CheckedRegistration> CheckRegistration(const RankIdentity& identity, wire::Register asked,
                                              const MemoryAccess& memory);

/// Makes every page that pieces use present and writable, in memory of a rank's own geometry.
///
/// Error: kResourceExhausted/kOutOfMemory.
Status TouchPieces(const Registration& registration, const MemoryAccess& memory);

}  // namespace tensorbus::agent
