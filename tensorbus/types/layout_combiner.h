#pragma once

#include <cstdint>
#include <deque>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tensorbus/base/status.h"
#include "tensorbus/types/layout.h"

namespace tensorbus {

/// Puts the ranks of a job together one after the other, so that one rank's layout is there at a
/// time. Tensors appear in the order in which ranks name them; equal holdings are stored once.
/// Confined.
class LayoutCombiner {
 public:
  /// Adds the next rank, from 0 on. Errors: kLayoutMismatch/kDtypeMismatch when an earlier rank
  /// gave a name another shape or dtype; the combiner is then of no more use.
  Status Add(const RankLayout& rank);
  /// Error: kInvalidArgument when no or too many ranks were added.
  Result<JobLayout> Finish() &&;

 private:
  std::uint32_t rank_count_ = 0;
  std::deque<TensorSpec> specs_;
  std::vector<Holding> holdings_;                            ///< by tensor
  std::unordered_map<std::string_view, std::size_t> index_;  ///< into `specs_`, by name
};

}  // namespace tensorbus
