#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/daemon/coverage.h"
#include "tensorbus/daemon/model.h"

// What becomes of registered layouts: work for SideWork. Pure.
namespace tensorbus::daemon {

/// One rank as it registered.
struct RankPart {
  std::uint32_t rank = 0;
  std::shared_ptr<const std::string> blob;  ///< Serialize(RankLayout)
  std::uint64_t bytes = 0;
  RankClaim claim;
};
/// The ranks that are there, in order.
std::vector<RankPart> PartsOf(const std::map<std::uint32_t, RankState>& ranks);

/// What a rank's layout comes to.
struct RankSummary {
  Hash128 hash;
  std::uint64_t bytes = 0;  ///< of all its boxes
};

/// Parses a rank's layout and, with a manifest, checks it against that. Errors: kInvalidArgument
/// when it is malformed; as CheckRankFits().
Result<RankSummary> CheckRank(const RankPart& part, const LayoutEntry* manifest);

/// Combines ranks 0..n-1 (all must be there) and derives the rest. Errors: as LayoutCombiner's.
Result<std::shared_ptr<const LayoutEntry>> Assemble(const std::vector<RankPart>& ranks);

/// Checks all ranks of a replica that are there against the manifest; with `combined`, the layout
/// of all of them, also that the replica holds every tensor. Errors: as CheckReplicaFits().
Status CheckReplica(const LayoutEntry& manifest, const std::vector<RankPart>& ranks,
                    const LayoutEntry* combined, std::string_view who);

}  // namespace tensorbus::daemon
