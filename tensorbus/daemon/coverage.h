#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

// Whether what a consumer holds fits the channel's manifest. Pure.
namespace tensorbus::daemon {

/// A layout's tensors by name. Immutable; borrows the layout.
class TensorIndex {
 public:
  explicit TensorIndex(const JobLayout& layout);

  const JobLayout& layout() const { return layout_; }
  /// Null when there is none.
  const JobLayout::Tensor* Find(std::string_view name) const;

 private:
  const JobLayout& layout_;
  std::unordered_map<std::string_view, std::uint32_t> index_;
};

/// What a rank says of itself: its name for messages, and what it takes no or only a part of.
struct RankClaim {
  std::string who;
  std::vector<std::string> leave_out;
};

/// Checks one rank: every tensor it names exists with the same dtype and shape, and every name it
/// leaves out exists.
///
/// Errors, each naming rank, tensor and remedy: kFailedPrecondition with kUnknownTensor (and the
/// nearest names), kDtypeMismatch or kLayoutMismatch.
Status CheckRankFits(const TensorIndex& manifest, const RankLayout& rank, const RankClaim& claim);

/// Checks a whole replica (`ranks` in order, `replica` their layouts combined): each rank as above,
/// and every tensor of the manifest is held whole by the ranks together or left out. A tensor that
/// some rank leaves out may also be held in part.
///
/// Errors: as above; kFailedPrecondition/kLayoutMismatch listing the first names that nobody holds
/// and nobody leaves out, or naming tensor, box and ranks where a part is missing.
Status CheckReplicaFits(const TensorIndex& manifest, const JobLayout& replica,
                        const std::vector<RankClaim>& ranks, std::string_view who);

/// Names of `manifest` that are nearest to `name`, best first, at most `limit`.
std::vector<std::string> NearestNames(const JobLayout& manifest, std::string_view name,
                                      std::size_t limit);

}  // namespace tensorbus::daemon
