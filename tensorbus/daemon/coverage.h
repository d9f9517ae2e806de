#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

// Whether what a consumer holds fits the channel's manifest. Pure.
namespace tensorbus::daemon {

/// Checks one rank: every tensor it names exists with the same dtype and shape, and every name it
/// leaves out exists. `who` is the rank's name for messages.
///
/// Errors, each naming rank, tensor and remedy: kFailedPrecondition with kUnknownTensor (and the
/// nearest names), kDtypeMismatch or kLayoutMismatch.
Status CheckRankFits(const JobLayout& manifest, const RankLayout& rank,
                     const std::vector<std::string>& leave_out, std::string_view who);

/// Checks a whole replica: every tensor of the manifest is held by some rank or left out.
///
/// Errors: kFailedPrecondition/kLayoutMismatch listing the first names that are neither.
Status CheckReplicaCovers(const JobLayout& manifest, const JobLayout& replica,
                          const std::vector<std::string>& leave_out, std::string_view who);

/// Names of `manifest` that are nearest to `name`, best first, at most `limit`.
std::vector<std::string> NearestNames(const JobLayout& manifest, std::string_view name,
                                      std::size_t limit);

}  // namespace tensorbus::daemon
