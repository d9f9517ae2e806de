#include "planner/class_plan.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <tuple>

#include "planner/choose.h"
#include "planner/rounds.h"

namespace tensorbus::planner {
namespace {

/// Gives the boxes that are sent their final numbers: ascending, equal boxes one number.
void NumberBoxes(const BoxTable& known, const std::vector<Box>& cuts, ClassPlan* plan) {
  const auto cuts_begin = static_cast<std::uint32_t>(known.size());
  const auto box = [&](std::uint32_t number) -> const Box& {
    return number < cuts_begin ? known[number] : cuts[number - cuts_begin];
  };
  constexpr std::uint32_t kUnused = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> renamed(known.size() + cuts.size(), kUnused);
  std::vector<std::uint32_t> used;
  for (const std::vector<Passage>& passages : plan->passages) {
    for (const Passage& p : passages) {
      if (renamed[p.box] != kUnused) continue;
      renamed[p.box] = 0;
      used.push_back(p.box);
    }
  }
  std::sort(used.begin(), used.end(),
            [&](std::uint32_t a, std::uint32_t b) { return box(a) < box(b); });
  for (const std::uint32_t number : used) {
    const Box& next = box(number);
    if (plan->boxes.empty() || plan->boxes.back() != next) plan->boxes.push_back(next);
    renamed[number] = static_cast<std::uint32_t>(plan->boxes.size() - 1);
  }
  for (std::vector<Passage>& passages : plan->passages) {
    for (Passage& p : passages) p.box = renamed[p.box];
    std::sort(passages.begin(), passages.end());
  }
}

/// Leaves out the paths that no box takes: those that it took at first, but then another.
void DropUnusedPaths(ClassPlan* plan) {
  constexpr std::uint32_t kUnused = std::numeric_limits<std::uint32_t>::max();
  std::vector<std::uint32_t> renamed(plan->paths.size(), kUnused);
  for (const std::vector<Passage>& passages : plan->passages) {
    for (const Passage& p : passages) renamed[p.path] = 0;
  }
  PathTable used;
  for (std::size_t p = 0; p < renamed.size(); ++p) {
    if (renamed[p] == kUnused) continue;
    const std::span<const std::uint32_t> routes = plan->paths[p];
    used.routes.insert(used.routes.end(), routes.begin(), routes.end());
    renamed[p] = used.Close();
  }
  plan->paths = std::move(used);
  for (std::vector<Passage>& passages : plan->passages) {
    for (Passage& p : passages) p.path = renamed[p.path];
  }
}

/// Gives the routes that paths have their final numbers. Returns the hop of each.
std::vector<std::uint32_t> NumberRoutes(const Numbering<RouteKey, HashOfRouteKey>& known,
                                        ClassPlan* plan) {
  std::vector<bool> used(known.size());
  for (const std::uint32_t r : plan->paths.routes) used[r] = true;
  std::vector<std::uint32_t> order;
  for (std::uint32_t r = 0; r < used.size(); ++r) {
    if (used[r]) order.push_back(r);
  }
  const auto place = [&](std::uint32_t r) {
    const RouteKey& key = known[r];
    return std::tuple(key.target, key.hop > 0, key.source, key.hop);
  };
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return place(a) < place(b); });
  std::vector<std::uint32_t> renamed(known.size());
  std::vector<std::uint32_t> hops;
  for (const std::uint32_t r : order) {
    const RouteKey& key = known[r];
    renamed[r] = static_cast<std::uint32_t>(plan->routes.size());
    Route& route = plan->routes.emplace_back();
    route.source = key.source;
    route.target = key.target;
    route.local = key.local;
    route.relayed = key.hop > 0;
    hops.push_back(key.hop);
  }
  for (std::uint32_t& r : plan->paths.routes) r = renamed[r];
  return hops;
}

/// Adds up what each route carries, and where its ops will stand.
void FillRoutes(ClassPlan* plan) {
  struct Load {
    std::uint64_t ops = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Load> loads(plan->paths.size());
  for (std::size_t c = 0; c < plan->classes.size(); ++c) {
    const std::uint32_t item_bytes = ItemBytes(plan->classes[c].dtype);
    for (const Passage& p : plan->passages[c]) {
      loads[p.path].ops += p.last - p.first;
      loads[p.path].bytes += plan->boxes[p.box].volume() * item_bytes * (p.last - p.first);
    }
  }
  for (std::size_t p = 0; p < loads.size(); ++p) {
    for (const std::uint32_t r : plan->paths[p]) {
      plan->routes[r].op_count += loads[p].ops;
      plan->routes[r].bytes += loads[p].bytes;
    }
  }
  std::uint64_t first = 0;
  for (Route& route : plan->routes) {
    route.first_op = first;
    first += route.op_count;
  }
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
Hash128 DigestOf(const LayoutMatch& match, std::span<const std::uint32_t> hops,
                 const ClassPlan& plan) {
  constexpr std::uint32_t kPlanFormat = 3;
  Hasher hasher;
  hasher.AddU32(kPlanFormat);
  hasher.AddU64(match.digest.low);
  hasher.AddU64(match.digest.high);
  hasher.AddU64(plan.routes.size());
  for (std::size_t r = 0; r < plan.routes.size(); ++r) {
    hasher.AddU32(plan.routes[r].target);
    hasher.AddU32(plan.routes[r].source);
    hasher.AddU8(plan.routes[r].local ? 1 : 0);
    hasher.AddU32(hops[r]);
  }
  hasher.AddU64(plan.paths.size());
  hasher.AddBytes(std::as_bytes(std::span(plan.paths.starts)));
  hasher.AddBytes(std::as_bytes(std::span(plan.paths.routes)));
  for (const std::vector<Passage>& passages : plan.passages) {
    hasher.AddU64(passages.size());
    for (const Passage& p : passages) {
      hasher.AddU32(p.first);
      hasher.AddU32(p.last);
      hasher.AddU32(p.path);
      AddBox(hasher, plan.boxes[p.box]);
    }
  }
  return hasher.Finish();
}

Result<ChosenPaths> Choose(const LayoutMatch& match, const TopologyIndex& places, PlanFault* fault,
                           const PlanOptions& options) {
  if (!options.relays) return ChooseHolders(match, places, options.lost, fault);
  return ChooseRelays(match, places, options.lost, fault);
}

}  // namespace

Result<ClassPlan> BuildClassPlan(const LayoutMatch& match, const Topology& topology,
                                 PlanFault* fault, const PlanOptions& options) {
  TB_ASSIGN_OR_RETURN(
      const TopologyIndex places,
      TopologyIndex::Create(topology, match.source->rank_count, match.target->rank_count));
  TB_ASSIGN_OR_RETURN(ChosenPaths chosen, Choose(match, places, fault, options));
  ClassPlan plan;
  plan.options = options;
  plan.classes = match.classes;
  plan.passages = std::move(chosen.by_class);
  plan.paths = std::move(chosen.paths);
  DropUnusedPaths(&plan);
  NumberBoxes(match.boxes, chosen.cuts, &plan);
  const std::vector<std::uint32_t> hops = NumberRoutes(chosen.routes, &plan);
  FillRoutes(&plan);
  TB_RETURN_IF_ERROR(CheckOpCount(plan));
  NumberRounds(hops, &plan);
  plan.digest = DigestOf(match, hops, plan);
  return plan;
}

}  // namespace tensorbus::planner
