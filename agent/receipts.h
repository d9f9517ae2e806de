#pragma once

#include <functional>
#include <memory>

#include "agent/piece_work.h"
#include "agent/rank.h"

namespace tensorbus::agent {

/// Digests what every route of `routes` will read from `memory`, block by block. A box that several
/// routes read is digested once. `done` runs on the executor. Errors: ForeignMemory's.
void MakeRouteSums(const PieceWork& work, std::shared_ptr<const BoundRoutes> routes,
                   std::shared_ptr<const MemoryAccess> memory,
                   std::function<void(Result<RouteSums>)> done);

/// The first piece whose sum differs, or -1.
std::int64_t FirstDifference(const std::vector<DigestSum>& a, const std::vector<DigestSum>& b);

}  // namespace tensorbus::agent
