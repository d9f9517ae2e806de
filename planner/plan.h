#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensorbus/base/hash.h"
#include "tensorbus/base/status.h"
#include "tensorbus/types/copy_op.h"
#include "tensorbus/types/layout.h"

namespace tensorbus::planner {

/// Bounds on a plan; layouts that ask for more are refused before anything is allocated for it.
/// Parts are boxes that one target needs of one region, counted once for a class of tensors.
inline constexpr std::uint64_t kMaxPlanParts = std::uint64_t{1} << 23;
inline constexpr std::uint64_t kMaxPlanOps = std::uint64_t{1} << 28;

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
  /// Busiest device: what its source sends first-hand and what its targets pass on.
  std::uint64_t max_send_bytes = 0;
  std::uint64_t max_port_bytes = 0;  ///< busiest device: to other nodes or from them, one way
  std::uint64_t lower_bound_bytes = 0;
  std::uint64_t class_count = 0;
  std::uint64_t route_count = 0;
  std::uint64_t op_count = 0;
  std::uint64_t round_count = 0;
  std::uint64_t schedule_bytes = 0;  ///< of the heaviest route of each round, all rounds together
};

/// Some ranks of both sides, each list ascending.
struct RankSelection {
  std::vector<std::uint32_t> sources;
  std::vector<std::uint32_t> targets;
};

/// What to plan, beyond the layouts.
struct PlanOptions {
  /// Every byte leaves the sources once and enters each node once; targets pass on what they got.
  bool relays = false;
  /// Ranks that are gone: whatever the layouts say, they hold nothing and need nothing.
  RankSelection lost = {};
};

/// What goes from one rank to one target rank in one round: all of it, unless it is relayed.
struct Route {
  std::uint32_t source = 0;  ///< source rank; of a relayed route the target rank that passes it on
  std::uint32_t target = 0;
  std::uint64_t first_op = 0;  ///< its ops are [first_op, first_op + op_count) of Plan::ops
  std::uint64_t op_count = 0;
  std::uint64_t bytes = 0;
  bool local = false;       ///< both ranks are on one device
  bool relayed = false;     ///< its ops pass on what `source` received in lower rounds
  std::uint32_t round = 0;  ///< when to send it; local routes are in no round and say 0

  friend bool operator==(const Route&, const Route&) = default;
};

/// A copy op as a plan stores it: there are millions of them, but few different boxes, and the rest
/// is said by its route. OpsOf() reads it as a CopyOp.
struct RouteOp {
  std::uint32_t tensor = 0;  ///< index into the target layout's tensors
  std::uint32_t box = 0;     ///< index into Plan::boxes

  friend auto operator<=>(const RouteOp&, const RouteOp&) = default;
};

/// Who sends what to whom, for every rank. Immutable; same input, same plan, byte for byte,
/// everywhere.
struct Plan {
  std::vector<Box> boxes;  ///< distinct, ascending
  /// The ops of one route stand together, ordered by tensor, then box.
  std::vector<RouteOp> ops;
  /// Ordered by target, then first-hand before relayed, then source, then round; only relayed
  /// routes share all but the round. In a round every rank sends to at most one and receives from
  /// at most one. What a relayed route passes on arrived in lower rounds, so no wait can be
  /// circular.
  std::vector<Route> routes;
  std::uint32_t round_count = 0;
  std::uint32_t class_count = 0;
  PlanOptions options;  ///< as asked for
  Hash128 digest;       ///< XXH3-128 of the canonical class-level plan
};

/// The ops of one route in stream order, each put together when it is read. Borrows the plan.
class OpRange {
 public:
  OpRange() = default;
  OpRange(const Plan& plan, const Route& route)
      : plan_(&plan), route_(&route), size_(static_cast<std::size_t>(route.op_count)) {}

  class Iterator {
   public:
    Iterator(const OpRange& ops, std::size_t at) : ops_(ops), at_(at) {}
    CopyOp operator*() const { return ops_[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    const OpRange& ops_;
    std::size_t at_;
  };

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  CopyOp operator[](std::size_t i) const {
    const RouteOp& op = plan_->ops[static_cast<std::size_t>(route_->first_op) + i];
    return {op.tensor,     route_->source,  route_->target,
            route_->local, route_->relayed, plan_->boxes[op.box]};
  }
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, size_}; }

 private:
  const Plan* plan_ = nullptr;
  const Route* route_ = nullptr;
  std::size_t size_ = 0;
};

inline OpRange OpsOf(const Plan& plan, const Route& route) {
  return {plan, route};
}

/// The details of a plan that cannot be, for programs; the Status says the same for people.
struct PlanFault {
  std::string tensor;
  std::optional<std::uint32_t> rank;      ///< target rank that needs it
  std::optional<Box> box;                 ///< the needed part
  std::vector<std::string> near_names;    ///< for an unknown tensor: source names like it
  std::vector<std::uint32_t> near_ranks;  ///< for kNoHolder: source ranks that hold other parts
};

/// Plans the transfer of everything `target` asks for from `source`; both must be valid
/// (Validate()). Pure.
///
/// Errors: kFailedPrecondition with kUnknownTensor, kLayoutMismatch (shape), kDtypeMismatch or
/// kNoHolder, naming tensor, target rank and box; then `fault`, if given, holds the details.
/// kInvalidArgument for a topology that names ranks that are not there; kResourceExhausted for
/// layouts whose boxes overlap in too many ways, that would move more than 2^62 bytes, or whose
/// plan would exceed kMaxPlanParts or kMaxPlanOps.
Result<Plan> BuildPlan(const JobLayout& source, const JobLayout& target, const Topology& topology,
                       PlanFault* fault = nullptr, const PlanOptions& options = {});

/// The ops of one first-hand route, in stream order. Empty when the pair exchanges nothing.
OpRange RouteOps(const Plan& plan, std::uint32_t source, std::uint32_t target);

/// The figures of a plan made from these layouts. Errors as BuildPlan().
Result<PlanFigures> FiguresOf(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& plan);

/// The least that the busiest rank can send to other nodes, or get from them, in any plan with
/// these options. Without relays that is whatever a target needs and its node does not hold. With
/// them each such byte comes to one of the node's ranks that need it; it leaves from one of the
/// targets that got it from a source on their own node, or else, once, from a source. Errors as
/// BuildPlan().
Result<std::uint64_t> LeastPortBytes(const JobLayout& source, const JobLayout& target,
                                     const Topology& topology, const PlanOptions& options = {});

/// Whether to relay, and a clause that says why.
struct RelayVerdict {
  bool relays = false;
  std::string why;
};

/// Weighs two plans of one transfer, without relays and with them, by what bounds their time: the
/// busiest device and the busiest port between nodes. Relays must lower one of them by more than
/// 1/64 and raise neither by as much.
RelayVerdict WeighRelays(const PlanFigures& direct, const PlanFigures& relayed);

}  // namespace tensorbus::planner
