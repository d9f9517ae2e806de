#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/copy_op.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::planner {

/// What the planner knows of the machines. Ranks that are in no node are each a node of their own.
struct Topology {
  struct Node {
    std::vector<std::uint32_t> source;  ///< source ranks on this node
    std::vector<std::uint32_t> target;  ///< target ranks on this node
  };
  std::vector<Node> nodes;
  /// Source rank and target rank that share a device: bytes held there are copied, never sent.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> same_device;
};

/// Byte figures of a plan, as `tensorbusctl plan --json` gives them.
struct PlanFigures {
  std::uint64_t unique_bytes = 0;
  std::vector<std::uint64_t> recv_bytes;   ///< by target
  std::vector<std::uint64_t> local_bytes;  ///< by target
  std::vector<std::uint64_t> send_bytes;   ///< by source
  std::vector<std::uint64_t> relay_bytes;  ///< by target
  std::vector<std::uint64_t> node_in_bytes;
  std::uint64_t lower_bound_bytes = 0;
  std::uint64_t class_count = 0;
  std::uint64_t route_count = 0;
  std::uint64_t op_count = 0;
  std::uint64_t round_count = 0;
};

/// Who sends what to whom, for every rank. Immutable; same input, same plan, byte for byte,
/// everywhere.
struct Plan {
  /// Ordered by target, then source, then tensor, then box: the ops of one route stand together.
  std::vector<CopyOp> ops;
  Hash128 digest;  ///< XXH3-128 of the canonical class-level plan
};

/// Plans the transfer of everything `target` asks for from `source`. Pure.
///
/// Errors: kFailedPrecondition with kUnknownTensor, kLayoutMismatch (shape), kDtypeMismatch or
/// kNoHolder, naming tensor, target rank and box.
Result<Plan> BuildPlan(const JobLayout& source, const JobLayout& target, const Topology& topology);

/// The ops of one route, in stream order. Empty when the pair exchanges nothing.
std::span<const CopyOp> RouteOps(const Plan& plan, std::uint32_t source, std::uint32_t target);

}  // namespace tensorbus::planner
