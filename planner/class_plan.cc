#include "planner/class_plan.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <tuple>

#include "planner/choose.h"
#include "planner/rounds.h"

namespace tensorbus::planner {
namespace {

/// Gives the boxes that transfers use their final numbers: ascending, equal boxes one number.
void NumberBoxes(const BoxTable& known, const std::vector<Box>& cuts, ClassPlan* plan) {
  const auto cuts_begin = static_cast<std::uint32_t>(known.size());
  const auto box = [&](std::uint32_t number) -> const Box& {
    return number < cuts_begin ? known[number] : cuts[number - cuts_begin];
  };
  constexpr std::uint32_t kUnused = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> renamed(known.size() + cuts.size(), kUnused);
  std::vector<std::uint32_t> used;
  for (const std::vector<Transfer>& transfers : plan->transfers) {
    for (const Transfer& t : transfers) {
      if (renamed[t.box] != kUnused) continue;
      renamed[t.box] = 0;
      used.push_back(t.box);
    }
  }
  std::sort(used.begin(), used.end(),
            [&](std::uint32_t a, std::uint32_t b) { return box(a) < box(b); });
  for (const std::uint32_t number : used) {
    const Box& next = box(number);
    if (plan->boxes.empty() || plan->boxes.back() != next) plan->boxes.push_back(next);
    renamed[number] = static_cast<std::uint32_t>(plan->boxes.size() - 1);
  }
  for (std::vector<Transfer>& transfers : plan->transfers) {
    for (Transfer& t : transfers) t.box = renamed[t.box];
  }
}

void SortTransfers(ClassPlan* plan) {
  for (std::vector<Transfer>& transfers : plan->transfers) {
    std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
      return std::tie(a.target, a.hop, a.source, a.box, a.first) <
             std::tie(b.target, b.hop, b.source, b.box, b.first);
    });
  }
}

/// Tells routes apart, in their order in the plan.
struct RouteKey {
  std::uint32_t target;
  bool relayed;
  std::uint32_t source;
  std::uint32_t hop;

  explicit RouteKey(const Transfer& t)
      : target(t.target), relayed(t.hop > 0), source(t.source), hop(t.hop) {}
  auto operator<=>(const RouteKey&) const = default;
};

/// Finds the routes, what each carries, and where its ops will stand. Returns the hop of each.
std::vector<std::uint32_t> MakeRoutes(ClassPlan* plan) {
  std::vector<RouteKey> keys;
  for (const std::vector<Transfer>& transfers : plan->transfers) {
    for (const Transfer& t : transfers) keys.emplace_back(t);
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  plan->routes.resize(keys.size());
  for (std::size_t c = 0; c < plan->classes.size(); ++c) {
    const std::uint32_t item_bytes = ItemBytes(plan->classes[c].dtype);
    for (Transfer& t : plan->transfers[c]) {
      const auto at = std::lower_bound(keys.begin(), keys.end(), RouteKey(t));
      t.route = static_cast<std::uint32_t>(at - keys.begin());
      Route& route = plan->routes[t.route];
      route.source = t.source;
      route.target = t.target;
      route.local = t.local;
      route.relayed = t.hop > 0;
      route.op_count += t.last - t.first;
      route.bytes += plan->boxes[t.box].volume() * item_bytes * (t.last - t.first);
    }
  }
  std::uint64_t first = 0;
  for (Route& route : plan->routes) {
    route.first_op = first;
    first += route.op_count;
  }
  std::vector<std::uint32_t> hops;
  for (const RouteKey& key : keys) hops.push_back(key.hop);
  return hops;
}

Status CheckOpCount(const ClassPlan& plan) {
  if (plan.routes.empty()) return {};
  const std::uint64_t ops = plan.routes.back().first_op + plan.routes.back().op_count;
  if (ops <= kMaxPlanOps) return {};
  return {
      Code::kResourceExhausted,
      fmt::format("the plan would have {} copy ops; at most {} are supported", ops, kMaxPlanOps),
      Reason::kUnsupported};
}

/// Hop by hop, so that what is passed on has arrived in an earlier round.
void NumberRounds(std::span<const std::uint32_t> hops, ClassPlan* plan) {
  const std::uint32_t last = hops.empty() ? 0 : *std::max_element(hops.begin(), hops.end());
  for (std::uint32_t hop = 0; hop <= last; ++hop) {
    std::vector<Traffic> traffic;
    std::vector<Route*> sent;
    for (std::size_t r = 0; r < hops.size(); ++r) {
      Route& route = plan->routes[r];
      if (route.local || hops[r] != hop) continue;
      traffic.push_back({route.source, route.target, route.bytes});
      sent.push_back(&route);
    }
    const std::vector<std::uint32_t> rounds = AssignRounds(traffic);
    const std::uint32_t first = plan->round_count;
    for (std::size_t i = 0; i < sent.size(); ++i) {
      sent[i]->round = first + rounds[i];
      plan->round_count = std::max(plan->round_count, sent[i]->round + 1);
    }
  }
}

void AddBox(Hasher& hasher, const Box& box) {
  hasher.AddU8(static_cast<std::uint8_t>(box.rank()));
  for (const Range& range : box.ranges()) {
    hasher.AddU64(range.lo);
    hasher.AddU64(range.hi);
  }
}

/// Hashes what every agent must agree on: names, shapes, and who sends which box to whom.
Hash128 DigestOf(const LayoutMatch& match, const ClassPlan& plan, const PlanOptions& options) {
  const std::uint32_t plan_format = options.relays ? 2 : 1;
  Hasher hasher;
  hasher.AddU32(plan_format);
  hasher.AddU32(match.source->rank_count);
  hasher.AddU32(match.target->rank_count);
  hasher.AddU64(plan.classes.size());
  for (std::size_t i = 0; i < plan.classes.size(); ++i) {
    const TensorClass& c = plan.classes[i];
    hasher.AddU8(static_cast<std::uint8_t>(c.dtype));
    hasher.AddU8(static_cast<std::uint8_t>(c.shape.rank()));
    for (const std::uint64_t dim : c.shape.dims()) hasher.AddU64(dim);
    hasher.AddU64(c.tensors.size());
    for (const std::uint32_t t : c.tensors) {
      hasher.AddU32(t);
      hasher.AddString(match.target->tensors[t].spec.name);
    }
    hasher.AddU64(plan.transfers[i].size());
    for (const Transfer& transfer : plan.transfers[i]) {
      hasher.AddU32(transfer.target);
      hasher.AddU32(transfer.source);
      hasher.AddU8(transfer.local ? 1 : 0);
      hasher.AddU32(transfer.first);
      hasher.AddU32(transfer.last);
      if (options.relays) hasher.AddU32(transfer.hop);
      AddBox(hasher, plan.boxes[transfer.box]);
    }
  }
  return hasher.Finish();
}

Result<ChosenTransfers> Choose(const LayoutMatch& match, const TopologyIndex& places,
                               PlanFault* fault, const PlanOptions& options) {
  if (!options.relays) return ChooseHolders(match, places, options.lost, fault);
  return ChooseRelays(match, places, options.lost, fault);
}

}  // namespace

Result<ClassPlan> BuildClassPlan(const LayoutMatch& match, const Topology& topology,
                                 PlanFault* fault, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(
      const TopologyIndex places,
      TopologyIndex::Create(topology, match.source->rank_count, match.target->rank_count));
  TB_ASSIGN_OR_RETURN(ChosenTransfers chosen, Choose(match, places, fault, options));
  ClassPlan plan;
  plan.options = options;
  plan.classes = match.classes;
  plan.transfers = std::move(chosen.by_class);
  NumberBoxes(match.boxes, chosen.cuts, &plan);
  SortTransfers(&plan);
  const std::vector<std::uint32_t> hops = MakeRoutes(&plan);
  TB_RETURN_IF_ERROR(CheckOpCount(plan));
  NumberRounds(hops, &plan);
  plan.digest = DigestOf(match, plan, options);
  return plan;
}

}  // namespace tensorbus::planner
