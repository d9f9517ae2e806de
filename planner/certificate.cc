#include "planner/certificate.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "planner/arrival_lists.h"
#include "planner/certificate_tables.h"
#include "planner/relay_certificate.h"
#include "planner/tiling.h"

namespace tensorbus::planner {
namespace {

constexpr std::uint32_t kNotNeeded = std::numeric_limits<std::uint32_t>::max();
constexpr const char* kNotAskedFor = ": not inside one box that the target asked for";

/// Whether a rank holds all of `inner` in one of its boxes.
bool Holds(const Holding& holding, std::uint32_t rank, const Box& inner) {
  const auto at =
      std::lower_bound(holding.ranks.begin(), holding.ranks.end(), rank,
                       [](const RankBoxes& held, std::uint32_t r) { return held.rank < r; });
  return at != holding.ranks.end() && at->rank == rank &&
         std::any_of(at->boxes.begin(), at->boxes.end(),
                     [&](const Box& box) { return box.Contains(inner); });
}

bool Among(const std::vector<std::uint32_t>& ranks, std::uint32_t rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

/// Checks what each target rank gets, one rank after the other.
///
/// Per rank each op is put on the list of what its tensor gets. Tensors of one pair of holdings
/// mostly get the very same ops and so have one list; its geometry is proven once.
class Checker {
 public:
  Checker(const JobLayout& source, const JobLayout& target, const Plan& plan, CheckedTables tables)
      : source_(source), target_(target), plan_(plan), tables_(std::move(tables)) {
    ListNeeds();
  }

  Result<Certificate> CheckAll(const RankSelection& lost) && {
    std::vector<std::uint32_t> targets;
    for (std::uint32_t rank = 0; rank < target_.rank_count; ++rank) {
      if (!Among(lost.targets, rank)) targets.push_back(rank);
    }
    for (const Route& route : plan_.routes) {
      const std::vector<std::uint32_t>& senders = route.relayed ? lost.targets : lost.sources;
      if (Among(lost.targets, route.target) || Among(senders, route.source))
        return CertificateFault(DescribeRoute(route) + ": one of them is lost");
    }
    return CheckTargets(targets);
  }

  Result<Certificate> CheckPart(const RankSelection& own) && {
    for (const Route& route : plan_.routes) {
      if (Among(own.targets, route.target)) continue;
      if (!Among(route.relayed ? own.targets : own.sources, route.source))
        return CertificateFault(DescribeRoute(route) + ": neither is one of the part's ranks");
      TB_RETURN_IF_ERROR(CheckSent(route));
    }
    return CheckTargets(own.targets);
  }

 private:
  /// Where the lists of the tensors of a pair of holdings begin.
  struct Beginning {
    std::uint64_t group = 0;  ///< which holding of which target; 0: none
    std::uint32_t list = 0;
  };
  /// What was found out of a list of arrivals.
  struct Proof {
    bool done = false;
    std::uint64_t elements = 0;
    std::size_t first = 0;  ///< its arrivals are [first, first + count) of `arrivals_`
    std::size_t count = 0;
    std::size_t passed = 0;  ///< the arrival that was last seen to be passed on
  };

  /// Of a pair of holdings, the box that was last found to lie on both ends of a route.
  struct Sent {
    const Route* route = nullptr;
    std::uint32_t wanted = 0;
    std::uint32_t box = 0;

    friend bool operator==(const Sent&, const Sent&) = default;
  };

  Result<Certificate> CheckTargets(std::span<const std::uint32_t> ranks) {
    const auto before = [](const Route& route, std::uint32_t rank) { return route.target < rank; };
    auto first = plan_.routes.begin();
    for (const std::uint32_t rank : ranks) {
      first = std::lower_bound(first, plan_.routes.end(), rank, before);
      const auto last = std::lower_bound(first, plan_.routes.end(), rank + 1, before);
      TB_RETURN_IF_ERROR(CheckTarget(rank, {first, last}));
      first = last;
    }
    certificate_.op_count = plan_.ops.size();
    return certificate_;
  }

  /// What goes to a target that somebody else checks. Most ops of a route lie alike.
  Status CheckSent(const Route& route) {
    sent_.resize(source_.holdings.size());
    for (const RouteOp& op : std::span(plan_.ops).subspan(route.first_op, route.op_count)) {
      const JobLayout::Tensor& tensor = target_.tensors[op.tensor];
      const std::uint32_t held = tables_.matches[op.tensor].holding;
      const Sent now = {&route, tensor.holding, op.box};
      if (sent_[held] == now) continue;
      const Box& box = plan_.boxes[op.box];
      TB_RETURN_IF_ERROR(CheckSource(route, op));
      if (!Holds(target_.HoldingOf(tensor), route.target, box))
        return CertificateFault(DescribeOp(target_, plan_, route, op) + kNotAskedFor);
      sent_[held] = now;
    }
    return {};
  }

  /// The box fits its tensor and lies in one box of the source.
  Status CheckSource(const Route& route, const RouteOp& op) const {
    const Box& box = plan_.boxes[op.box];
    const Shape& shape = target_.tensors[op.tensor].spec.shape;
    if (!box.Fits(shape)) {
      return CertificateFault(DescribeOp(target_, plan_, route, op) + ": out of bounds of shape " +
                              shape.ToString());
    }
    // Whether a target that passes a box on has it by then is for CheckRelay().
    if (route.relayed ||
        Holds(source_.holdings[tables_.matches[op.tensor].holding], route.source, box)) {
      return {};
    }
    return CertificateFault(DescribeOp(target_, plan_, route, op) +
                            ": not inside one box that the source holds");
  }

  /// By holding its tensors, by rank its holdings.
  void ListNeeds() {
    tensors_of_.resize(target_.holdings.size());
    for (std::uint32_t t = 0; t < target_.tensors.size(); ++t)
      tensors_of_[target_.tensors[t].holding].push_back(t);
    holdings_of_.resize(target_.rank_count);
    for (std::uint32_t h = 0; h < target_.holdings.size(); ++h) {
      for (const RankBoxes& boxes : target_.holdings[h].ranks)
        holdings_of_[boxes.rank].emplace_back(h, &boxes);
    }
    passed_on_.resize(target_.rank_count);
    for (const Route& route : plan_.routes) {
      if (route.relayed) passed_on_[route.source].push_back(&route);
    }
    list_of_.assign(target_.tensors.size(), kNotNeeded);
    beginnings_.resize(source_.holdings.size());
  }

  /// `routes` are those of one target rank.
  Status CheckTarget(std::uint32_t rank, std::span<const Route> routes) {
    BeginLists(rank);
    TB_RETURN_IF_ERROR(FillLists(routes));
    proofs_.assign(lists_.size(), {});
    arrivals_.clear();
    for (const auto& [holding, boxes] : holdings_of_[rank]) {
      for (const std::uint32_t t : tensors_of_[holding]) TB_RETURN_IF_ERROR(CheckNeed(t, *boxes));
    }
    for (const Route* route : passed_on_[rank]) TB_RETURN_IF_ERROR(CheckRelay(*route));
    for (const auto& [holding, boxes] : holdings_of_[rank]) {
      for (const std::uint32_t t : tensors_of_[holding]) list_of_[t] = kNotNeeded;
    }
    return {};
  }

  /// Tensors with the same holding on either side, and no others, begin with the same list.
  void BeginLists(std::uint32_t rank) {
    lists_.Clear();
    for (const auto& [holding, boxes] : holdings_of_[rank]) {
      ++group_;
      for (const std::uint32_t t : tensors_of_[holding]) {
        Beginning& beginning = beginnings_[tables_.matches[t].holding];
        if (beginning.group != group_) beginning = {group_, lists_.Begin()};
        list_of_[t] = beginning.list;
      }
    }
  }

  /// What arrives of a tensor is listed by source, then box.
  Status FillLists(std::span<const Route> routes) {
    for (const Route& route : routes) {
      const auto number = static_cast<std::uint32_t>(&route - plan_.routes.data());
      for (const RouteOp& op : std::span(plan_.ops).subspan(route.first_op, route.op_count)) {
        std::uint32_t& list = list_of_[op.tensor];
        if (list == kNotNeeded)
          return CertificateFault(DescribeOp(target_, plan_, route, op) +
                                  ": the target asked for no part of the tensor");
        list = lists_.Longer(list, {number, op.box});
      }
    }
    return {};
  }

  /// What the current target passes on along a route has reached it before.
  Status CheckRelay(const Route& route) {
    for (const RouteOp& op : std::span(plan_.ops).subspan(route.first_op, route.op_count)) {
      const std::uint32_t list = list_of_[op.tensor];
      // Then none of it arrives, or FillLists() had refused it: a fault, since no box is empty.
      if (list == kNotNeeded) return CheckPassedOn(target_, plan_, {}, route, op);
      Proof& proof = proofs_[list];
      const std::span<const Arrival> arrivals = ArrivalsOf(proof);
      if (!PassedAsItCame(arrivals, route, op.box, &proof.passed))
        TB_RETURN_IF_ERROR(CheckPassedOn(target_, plan_, arrivals, route, op));
    }
    return {};
  }

  /// Whether the very box arrives in time. That is how it mostly is, in the order of arrivals, so
  /// the search goes on at the last that was found.
  bool PassedAsItCame(std::span<const Arrival> arrivals, const Route& route, std::uint32_t box,
                      std::size_t* last) const {
    const auto is_it = [&](const Arrival& arrival) { return arrival.box == box; };
    const auto from = arrivals.begin() + static_cast<std::ptrdiff_t>(*last);
    auto found = std::find_if(from, arrivals.end(), is_it);
    if (found == arrivals.end()) found = std::find_if(arrivals.begin(), from, is_it);
    if (found == arrivals.end() || !is_it(*found)) return false;
    *last = static_cast<std::size_t>(found - arrivals.begin());
    return ArrivesBefore(plan_.routes[found->route], route.round);
  }

  std::span<const Arrival> ArrivalsOf(const Proof& proof) const {
    return std::span(arrivals_).subspan(proof.first, proof.count);
  }

  /// What the current target gets of a tensor that it needs.
  Status CheckNeed(std::uint32_t tensor, const RankBoxes& boxes) {
    const std::uint32_t list = list_of_[tensor];
    Proof& proof = proofs_[list];
    if (!proof.done) {
      proof.first = arrivals_.size();
      lists_.Read(list, &arrivals_);
      proof.count = arrivals_.size() - proof.first;
      TB_RETURN_IF_ERROR(CheckGeometry(tensor, boxes, ArrivalsOf(proof)));
      for (const Arrival& arrival : ArrivalsOf(proof))
        proof.elements += tables_.volumes[arrival.box];
      proof.done = true;
    }
    certificate_.bytes += proof.elements * tables_.matches[tensor].item_bytes;
    return {};
  }

  Status CheckGeometry(std::uint32_t tensor, const RankBoxes& boxes,
                       std::span<const Arrival> arrivals) {
    const TensorSpec& spec = target_.tensors[tensor].spec;
    const std::vector<Box>& wanted = boxes.boxes;
    tiles_.resize(std::max(tiles_.size(), wanted.size()));
    for (std::size_t b = 0; b < wanted.size(); ++b) tiles_[b].clear();
    for (const Arrival& arrival : arrivals) {
      const Route& route = plan_.routes[arrival.route];
      const RouteOp op = {tensor, arrival.box};
      TB_RETURN_IF_ERROR(CheckSource(route, op));
      const Box& box = plan_.boxes[arrival.box];
      std::size_t b = 0;
      while (b < wanted.size() && !wanted[b].Contains(box)) ++b;
      if (b == wanted.size())
        return CertificateFault(DescribeOp(target_, plan_, route, op) + kNotAskedFor);
      tiles_[b].push_back(box);
    }
    for (std::size_t b = 0; b < wanted.size(); ++b) {
      if (tiling_.Exact(wanted[b], tiles_[b])) continue;
      const TilingFault fault = FirstTilingFault(wanted[b], tiles_[b]);
      const auto dims = static_cast<std::size_t>(spec.shape.rank());
      return CertificateFault(
          fmt::format("tensor '{}': target {}, box {}: element [{}] is {}", spec.name, boxes.rank,
                      wanted[b].ToString(), fmt::join(std::span(fault.at).first(dims), ", "),
                      fault.twice ? "written more than once" : "never written"));
    }
    return {};
  }

  const JobLayout& source_;
  const JobLayout& target_;
  const Plan& plan_;
  CheckedTables tables_;
  std::vector<std::vector<std::uint32_t>> tensors_of_;  // by target holding
  std::vector<std::vector<std::pair<std::uint32_t, const RankBoxes*>>> holdings_of_;  // by target
  std::vector<std::vector<const Route*>> passed_on_;  // by target that sends
  std::vector<Sent> sent_;                            // by source holding
  // Of the current target:
  std::vector<std::uint32_t> list_of_;  // by tensor: what arrives of it, or kNotNeeded
  ArrivalLists lists_;
  std::vector<Proof> proofs_;            // by list
  std::vector<Arrival> arrivals_;        // of the lists that were proven
  std::uint64_t group_ = 0;              // of tensors of one holding
  std::vector<Beginning> beginnings_;    // by source holding, for the group's target holding
  std::vector<std::vector<Box>> tiles_;  // by needed box; scratch
  TilingCheck tiling_;
  Certificate certificate_;
};

}  // namespace

Result<Certificate> CheckPlan(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& plan,
                              const RankSelection& lost) {
  TB_ASSIGN_OR_RETURN(CheckedTables tables, CheckTables(source, target, topology, plan));
  return Checker(source, target, plan, std::move(tables)).CheckAll(lost);
}

Result<Certificate> CheckPart(const JobLayout& source, const JobLayout& target,
                              const Topology& topology, const Plan& part,
                              const RankSelection& ranks) {
  TB_ASSIGN_OR_RETURN(CheckedTables tables, CheckTables(source, target, topology, part));
  return Checker(source, target, part, std::move(tables)).CheckPart(ranks);
}

}  // namespace tensorbus::planner
