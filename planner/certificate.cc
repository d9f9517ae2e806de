#include "planner/certificate.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "planner/relay_certificate.h"
#include "planner/tiling.h"

namespace tensorbus::planner {
namespace {

Status Fault(std::string message, Reason reason = Reason::kPlanMismatch) {
  return {Code::kInternal, std::move(message), reason};
}

const RankBoxes* Find(const Holding& holding, std::uint32_t rank) {
  const auto at =
      std::lower_bound(holding.ranks.begin(), holding.ranks.end(), rank,
                       [](const RankBoxes& held, std::uint32_t r) { return held.rank < r; });
  return at != holding.ranks.end() && at->rank == rank ? &*at : nullptr;
}

/// The ops of one target rank for one tensor.
using OpList = std::vector<const CopyOp*>;

/// Checks what each target rank gets, one rank and tensor at a time.
class Checker {
 public:
  Checker(const JobLayout& source, const JobLayout& target, const Topology& topology,
          const Plan& plan)
      : source_(source), target_(target), plan_(plan) {
    for (const auto& pair : topology.same_device) same_device_.insert(pair);
  }

  Result<Certificate> Run() {
    TB_RETURN_IF_ERROR(CheckOrder());
    TB_RETURN_IF_ERROR(MatchNames());
    std::size_t first = 0;
    for (std::uint32_t rank = 0; rank < target_.rank_count; ++rank) {
      std::size_t last = first;
      while (last < plan_.ops.size() && plan_.ops[last].target == rank) ++last;
      TB_RETURN_IF_ERROR(CheckTarget(rank, std::span(plan_.ops).subspan(first, last - first)));
      first = last;
    }
    TB_RETURN_IF_ERROR(CheckRoutes());
    TB_RETURN_IF_ERROR(CheckRelays(target_, plan_));
    certificate_.op_count = plan_.ops.size();
    return certificate_;
  }

 private:
  static std::string Describe(const CopyOp& op, const JobLayout& target) {
    const std::string name = op.tensor < target.tensors.size()
                                 ? fmt::format("'{}'", target.tensors[op.tensor].spec.name)
                                 : fmt::format("number {}", op.tensor);
    return fmt::format("tensor {}: op from {} {} to target {}, box {}", name,
                       op.relayed ? "target" : "source", op.source, op.target, op.box.ToString());
  }

  /// Numbers in range and ops in their fixed order, without which nothing else can be looked up.
  Status CheckOrder() const {
    const CopyOp* previous = nullptr;
    for (const CopyOp& op : plan_.ops) {
      if (op.tensor >= target_.tensors.size())
        return Fault(Describe(op, target_) + ": no such tensor");
      const std::uint32_t sender_count = op.relayed ? target_.rank_count : source_.rank_count;
      if (op.source >= sender_count || op.target >= target_.rank_count)
        return Fault(Describe(op, target_) + ": no such rank");
      if (previous != nullptr) {
        const auto before = std::tie(previous->target, previous->relayed, previous->source);
        const auto now = std::tie(op.target, op.relayed, op.source);
        // A pair's relayed routes follow each other, each in order: CheckRoutes() looks at these.
        const bool in_order = op.relayed || std::tie(previous->tensor, previous->box) <
                                                std::tie(op.tensor, op.box);
        if (before > now || (before == now && !in_order))
          return Fault(Describe(op, target_) + ": out of order or repeated");
      }
      previous = &op;
    }
    return {};
  }

  Status MatchNames() {
    std::unordered_map<std::string_view, const JobLayout::Tensor*> by_name;
    by_name.reserve(source_.tensors.size());
    for (const JobLayout::Tensor& tensor : source_.tensors)
      by_name.emplace(tensor.spec.name, &tensor);
    for (const JobLayout::Tensor& tensor : target_.tensors) {
      const auto found = by_name.find(tensor.spec.name);
      if (found == by_name.end())
        return Fault(fmt::format("tensor '{}': unknown to the source", tensor.spec.name));
      if (found->second->spec != tensor.spec)
        return Fault(fmt::format("tensor '{}': shapes or dtypes differ", tensor.spec.name));
      matches_.push_back(found->second);
    }
    return {};
  }

  /// `ops` are those of one target rank.
  Status CheckTarget(std::uint32_t rank, std::span<const CopyOp> ops) {
    std::vector<std::uint32_t> starts(target_.tensors.size() + 1);
    for (const CopyOp& op : ops) ++starts[op.tensor + 1];
    for (std::size_t t = 0; t < target_.tensors.size(); ++t) starts[t + 1] += starts[t];
    OpList sorted(ops.size());
    std::vector<std::uint32_t> next(starts.begin(), starts.end() - 1);
    for (const CopyOp& op : ops) sorted[next[op.tensor]++] = &op;
    proven_.clear();
    std::vector<const RankBoxes*> needs;  // by holding
    for (const Holding& holding : target_.holdings) needs.push_back(Find(holding, rank));
    for (std::uint32_t t = 0; t < target_.tensors.size(); ++t) {
      const RankBoxes* needed = needs[target_.tensors[t].holding];
      const auto part =
          std::span<const CopyOp* const>(sorted).subspan(starts[t], starts[t + 1] - starts[t]);
      if (needed == nullptr && part.empty()) continue;
      TB_RETURN_IF_ERROR(CheckTensor(t, rank, needed, part));
    }
    return {};
  }

  /// Skips the geometry when a tensor of the same two holdings got the very same ops before.
  Status CheckTensor(std::uint32_t tensor, std::uint32_t rank, const RankBoxes* needed,
                     std::span<const CopyOp* const> ops) {
    const JobLayout::Tensor& wanted = target_.tensors[tensor];
    const JobLayout::Tensor& held = *matches_[tensor];
    auto& known = proven_[std::uint64_t{held.holding} << 32 | wanted.holding];
    const bool same =
        !known.empty() && known.size() == ops.size() &&
        std::equal(ops.begin(), ops.end(), known.begin(), [](const CopyOp* a, const CopyOp* b) {
          return a->source == b->source && a->local == b->local && a->relayed == b->relayed &&
                 a->box == b->box;
        });
    if (!same) {
      TB_RETURN_IF_ERROR(CheckGeometry(wanted, source_.HoldingOf(held), rank, needed, ops));
      known.assign(ops.begin(), ops.end());
    }
    for (const CopyOp* op : ops)
      certificate_.bytes += op->box.volume() * ItemBytes(wanted.spec.dtype);
    return {};
  }

  Status CheckGeometry(const JobLayout::Tensor& wanted, const Holding& held, std::uint32_t rank,
                       const RankBoxes* needed, std::span<const CopyOp* const> ops) {
    std::vector<std::vector<Box>> parts(needed == nullptr ? 0 : needed->boxes.size());
    for (const CopyOp* op : ops) {
      TB_RETURN_IF_ERROR(CheckOp(*op, wanted, held));
      std::size_t b = 0;
      while (b < parts.size() && !needed->boxes[b].Contains(op->box)) ++b;
      if (b == parts.size())
        return Fault(Describe(*op, target_) + ": not inside one box that the target asked for");
      parts[b].push_back(op->box);
    }
    for (std::size_t b = 0; b < parts.size(); ++b) {
      if (tiling_.Exact(needed->boxes[b], parts[b])) continue;
      const TilingFault fault = FirstTilingFault(needed->boxes[b], parts[b]);
      const auto dims = static_cast<std::size_t>(wanted.spec.shape.rank());
      return Fault(fmt::format("tensor '{}': target {}, box {}: element [{}] is {}",
                               wanted.spec.name, rank, needed->boxes[b].ToString(),
                               fmt::join(std::span(fault.at).first(dims), ", "),
                               fault.twice ? "written more than once" : "never written"));
    }
    return {};
  }

  Status CheckOp(const CopyOp& op, const JobLayout::Tensor& wanted, const Holding& held) const {
    if (!op.box.Fits(wanted.spec.shape) || op.box.empty()) {
      return Fault(fmt::format("{}: empty or out of bounds of shape {}", Describe(op, target_),
                               wanted.spec.shape.ToString()));
    }
    if (op.relayed) {
      if (!op.local) return {};  // that the sender has it by then is for CheckRelays()
      return Fault(Describe(op, target_) + ": called local, but it is passed on");
    }
    const RankBoxes* boxes = Find(held, op.source);
    const bool holds =
        boxes != nullptr && std::any_of(boxes->boxes.begin(), boxes->boxes.end(),
                                        [&](const Box& box) { return box.Contains(op.box); });
    if (!holds) return Fault(Describe(op, target_) + ": not inside one box that the source holds");
    const bool one_device = same_device_.contains({op.source, op.target});
    if (op.local != one_device) {
      return Fault(fmt::format("{}: {}", Describe(op, target_),
                               op.local ? "called local, but the ranks are on two devices"
                                        : "sent, but both ranks are on one device"));
    }
    return {};
  }

  /// The route table says the same as the ops, and no rank is asked to do two things in a round.
  Status CheckRoutes() const {
    std::uint64_t next = 0;
    std::set<std::tuple<bool, std::uint32_t, std::uint32_t>> sending;  // relayed, rank and round
    std::set<std::pair<std::uint32_t, std::uint32_t>> receiving;       // target and round
    const Route* previous = nullptr;
    for (const Route& route : plan_.routes) {
      const auto key = [](const Route& r) {
        return std::tuple(r.target, r.relayed, r.source, r.round);
      };
      const std::string name =
          fmt::format("route from {} {} to target {}", route.relayed ? "target" : "source",
                      route.source, route.target);
      if (previous != nullptr && key(*previous) >= key(route))
        return Fault(name + ": out of order or repeated");
      previous = &route;
      if (route.first_op != next || route.op_count == 0 ||
          route.op_count > plan_.ops.size() - next) {
        return Fault(name + ": its ops do not follow those of the route before it");
      }
      std::uint64_t bytes = 0;
      for (; next < route.first_op + route.op_count; ++next) {
        const CopyOp& op = plan_.ops[next];
        if (op.source != route.source || op.target != route.target || op.local != route.local ||
            op.relayed != route.relayed) {
          return Fault(name + ": holds an op of another route");
        }
        const CopyOp* before = next == route.first_op ? nullptr : &op - 1;
        if (before != nullptr &&
            std::tie(before->tensor, before->box) >= std::tie(op.tensor, op.box)) {
          return Fault(name + ": its ops are out of order");
        }
        bytes += op.box.volume() * ItemBytes(target_.tensors[op.tensor].spec.dtype);
      }
      if (bytes != route.bytes)
        return Fault(fmt::format("{}: {} bytes, its ops have {}", name, route.bytes, bytes));
      if (route.local) continue;
      if (route.round >= plan_.round_count ||
          !sending.emplace(route.relayed, route.source, route.round).second ||
          !receiving.emplace(route.target, route.round).second) {
        return Fault(
            fmt::format("{}: round {} of {} is taken", name, route.round, plan_.round_count));
      }
    }
    if (next != plan_.ops.size()) return Fault("ops that belong to no route");
    return {};
  }

  const JobLayout& source_;
  const JobLayout& target_;
  const Plan& plan_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> same_device_;
  std::vector<const JobLayout::Tensor*> matches_;     // by target tensor: the source's
  std::unordered_map<std::uint64_t, OpList> proven_;  // of the current rank, by pair of holdings
  TilingCheck tiling_;
  Certificate certificate_;
};

Status BufferFault(std::uint32_t rank, std::string message, Reason reason) {
  return {Code::kInvalidArgument, fmt::format("rank {}: {}", rank, message), reason};
}

}  // namespace

Result<Certificate> CheckPlan(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& plan) {
  return Checker(source, target, topology, plan).Run();
}

Status CheckBuffers(const RankLayout& layout, const Registration& registration, std::uint32_t rank,
                    bool is_target) {
  TB_RETURN_IF_ERROR(Validate(registration, rank, is_target));
  std::unordered_map<std::string_view, std::uint32_t> numbers;
  for (std::uint32_t t = 0; t < registration.tensors.size(); ++t)
    numbers.emplace(registration.tensors[t].name, t);
  std::set<std::pair<std::uint32_t, Box>> have;
  for (const Piece& piece : registration.pieces) have.emplace(piece.tensor, piece.box);
  for (const RankLayout::Tensor& tensor : layout.tensors) {
    const auto found = numbers.find(tensor.spec.name);
    if (found == numbers.end()) {
      if (tensor.boxes.empty()) continue;
      return BufferFault(rank, fmt::format("tensor '{}' is in no buffer", tensor.spec.name),
                         Reason::kUnknownTensor);
    }
    if (registration.tensors[found->second] != tensor.spec) {
      return BufferFault(rank,
                         fmt::format("tensor '{}': shape or dtype of its buffers differs from its "
                                     "layout",
                                     tensor.spec.name),
                         Reason::kLayoutMismatch);
    }
    for (const Box& box : tensor.boxes) {
      if (have.erase({found->second, box}) != 0) continue;
      return BufferFault(
          rank,
          fmt::format("tensor '{}': box {} is in no buffer", tensor.spec.name, box.ToString()),
          Reason::kLayoutMismatch);
    }
  }
  if (have.empty()) return {};
  const auto& [number, box] = *have.begin();
  return BufferFault(rank,
                     fmt::format("tensor '{}': a buffer is for box {}, which the layout has not",
                                 registration.tensors[number].name, box.ToString()),
                     Reason::kLayoutMismatch);
}

}  // namespace tensorbus::planner
