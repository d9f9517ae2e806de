#include "planner/rounds.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <unordered_set>

#include "planner/topology.h"
#include "tensorbus/base/check.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

/// How ranks that can only send and receive in a fixed order each run a plan.
enum class Lanes {
  kOverlapped,  ///< a rank's sends are in one order, its receives in another, both go on at once
  kSingle,      ///< a rank does one thing after the other
};
enum class Sends {
  kRendezvous,  ///< a send returns when the peer is receiving
  kBuffered,    ///< a send returns at once; what it sent waits for the receive
};

/// Tries every order in which the sends and receives of a plan can happen.
class Interleavings {
 public:
  /// `order`: the routes as every rank goes through them.
  Interleavings(const Plan& plan, std::vector<std::uint32_t> order, Lanes lanes, Sends sends)
      : plan_(plan), order_(std::move(order)), sends_(sends) {
    for (const std::uint32_t r : order_) AddSteps(r, lanes);
  }

  /// Whether some order of events ends with routes left and nobody able to go on.
  bool CanDeadlock() { return Explore({}); }
  std::size_t states() const { return seen_.size(); }

 private:
  /// Bit r: route r was sent; bit 32 + r: it was received.
  using State = std::uint64_t;
  static State Sent(std::uint32_t r) { return State{1} << r; }
  static State Received(std::uint32_t r) { return State{1} << (32 + r); }

  /// What must have happened before a rank comes to send or to receive a route.
  void AddSteps(std::uint32_t r, Lanes lanes) {
    const Route& route = plan_.routes[r];
    TB_CHECK(r < 32);
    before_send_.resize(plan_.routes.size());
    before_receive_.resize(plan_.routes.size());
    auto& out = lane_[{route.relayed, route.source, true}];
    auto& in = lane_[{true, route.target, lanes == Lanes::kSingle}];
    before_send_[r] = out;
    before_receive_[r] = in;
    if (route.relayed) {
      // What it passes on has arrived: all routes into the sender with a lower round.
      for (std::uint32_t i = 0; i < plan_.routes.size(); ++i) {
        const Route& into = plan_.routes[i];
        if (!into.local && into.target == route.source && into.round < route.round)
          before_send_[r] |= Received(i);
      }
    }
    out |= Sent(r);
    in |= Received(r);
  }

  bool Explore(State state) {
    if (!seen_.insert(state).second) return false;
    bool moved = false;
    for (const std::uint32_t r : order_) {
      const bool can_send = (state & Sent(r)) == 0 && (state & before_send_[r]) == before_send_[r];
      const bool can_receive =
          (state & Received(r)) == 0 && (state & before_receive_[r]) == before_receive_[r];
      if (sends_ == Sends::kRendezvous) {
        if (!can_send || !can_receive) continue;
        moved = true;
        if (Explore(state | Sent(r) | Received(r))) return true;
        continue;
      }
      if (can_send) {
        moved = true;
        if (Explore(state | Sent(r))) return true;
      }
      if (can_receive && (state & Sent(r)) != 0) {
        moved = true;
        if (Explore(state | Received(r))) return true;
      }
    }
    State all = 0;
    for (const std::uint32_t r : order_) all |= Sent(r) | Received(r);
    return !moved && state != all;
  }

  const Plan& plan_;
  std::vector<std::uint32_t> order_;
  Sends sends_;
  /// What a lane has been given so far: of targets or sources, by rank, for sends or receives.
  std::map<std::tuple<bool, std::uint32_t, bool>, State> lane_;
  std::vector<State> before_send_;
  std::vector<State> before_receive_;
  std::unordered_set<State> seen_;
};

std::vector<std::uint32_t> RoutesBy(const Plan& plan,
                                    const std::function<std::uint64_t(const Route&)>& key) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t r = 0; r < plan.routes.size(); ++r) {
    if (!plan.routes[r].local) order.push_back(r);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return key(plan.routes[a]) < key(plan.routes[b]);
  });
  return order;
}

JobLayout PlacedLayout(std::uint32_t ranks, const Placement& placement) {
  const std::vector<TensorSpec> specs = {{"a", DType::kU8, MakeShape({1 << 20})}};
  const std::vector<Placement> placements = {placement};
  return JobOf(ranks, specs, Resolve(Mesh({ranks}), placements, specs[0].shape, ranks).value());
}

/// Routes that a plan may have for all orders to be tried in a moment.
constexpr std::size_t kMaxRoutes = 22;

/// Small plans, among them every target relaying to every other.
std::vector<Plan> SmallPlans() {
  std::vector<Plan> plans;
  for (std::uint32_t sources = 1; sources <= 3; ++sources) {
    for (std::uint32_t targets = 1; targets <= 4; ++targets) {
      for (const Placement& held : {Placement(), Shard(0)}) {
        for (const Placement& needed : {Placement(), Shard(0)}) {
          for (const bool relays : {false, true}) {
            for (const bool colocated : {false, true}) {
              const auto plan = BuildPlan(
                  PlacedLayout(sources, held), PlacedLayout(targets, needed),
                  DefaultTopology(sources, targets, colocated), nullptr, {.relays = relays});
              if (plan->routes.size() <= kMaxRoutes) plans.push_back(*plan);
            }
          }
        }
      }
    }
  }
  return plans;
}

TEST(Rounds, NoOrderOfBlockingSendsAndReceivesDeadlocks) {
  std::size_t relayed = 0;
  std::size_t states = 0;
  for (const Plan& plan : SmallPlans()) {
    // Every rank goes round by round; one that does a thing at a time takes routes of a round in
    // the plan's order.
    const auto by_round = RoutesBy(plan, [](const Route& route) { return route.round; });
    for (const Lanes lanes : {Lanes::kOverlapped, Lanes::kSingle}) {
      for (const Sends sends : {Sends::kRendezvous, Sends::kBuffered}) {
        Interleavings all(plan, by_round, lanes, sends);
        EXPECT_FALSE(all.CanDeadlock());
        states += all.states();
      }
    }
    for (const Route& route : plan.routes) relayed += route.relayed ? 1 : 0;
  }
  EXPECT_GT(relayed, 100U);
  EXPECT_GT(states, 10000U);
}

TEST(Rounds, TheSearchFindsDeadlocksOfOtherOrders) {
  // Two targets pass a half each on to the other. When both send before they receive, neither does.
  Plan plan;
  plan.routes = {{.source = 0, .target = 0, .round = 0},
                 {.source = 1, .target = 0, .relayed = true, .round = 2},
                 {.source = 0, .target = 1, .round = 1},
                 {.source = 0, .target = 1, .relayed = true, .round = 2}};
  EXPECT_FALSE(Interleavings(plan, {0, 2, 1, 3}, Lanes::kSingle, Sends::kRendezvous).CanDeadlock());
  // Receives that come before what is passed on has been sent.
  EXPECT_TRUE(Interleavings(plan, {1, 3, 0, 2}, Lanes::kSingle, Sends::kRendezvous).CanDeadlock());
  EXPECT_TRUE(
      Interleavings(plan, {1, 3, 0, 2}, Lanes::kOverlapped, Sends::kBuffered).CanDeadlock());
  // Some small plan, with every rank going by its peers' numbers instead of by rounds.
  bool found = false;
  for (const Plan& small : SmallPlans()) {
    const auto by_target = RoutesBy(small, [](const Route& route) { return route.target; });
    Interleavings all(small, by_target, Lanes::kSingle, Sends::kRendezvous);
    found = found || all.CanDeadlock();
  }
  EXPECT_TRUE(found);
}

TEST(Rounds, AreAsFewAsTheBusiestRankHasPartners) {
  for (std::uint32_t sources = 1; sources <= 9; ++sources) {
    for (std::uint32_t targets = 1; targets <= 9; ++targets) {
      std::vector<Traffic> traffic;
      for (std::uint32_t s = 0; s < sources; ++s) {
        for (std::uint32_t t = 0; t < targets; ++t) {
          if ((s * 7 + t * 5) % 4 != 0) traffic.push_back({s, t, 1 + (s * t) % 5});
        }
      }
      std::map<std::pair<bool, std::uint32_t>, std::uint32_t> partners;
      std::uint32_t most = 0;
      for (const Traffic& t : traffic) {
        most = std::max(most, ++partners[{false, t.source}]);
        most = std::max(most, ++partners[{true, t.target}]);
      }
      const std::vector<std::uint32_t> rounds = AssignRounds(traffic);
      std::set<std::tuple<bool, std::uint32_t, std::uint32_t>> taken;
      for (std::size_t i = 0; i < traffic.size(); ++i) {
        EXPECT_LT(rounds[i], most);
        EXPECT_TRUE(taken.emplace(false, traffic[i].source, rounds[i]).second);
        EXPECT_TRUE(taken.emplace(true, traffic[i].target, rounds[i]).second);
      }
    }
  }
}

TEST(Rounds, KeepEverybodyBusyWhenLoadsAreEven) {
  // A ring of relays: in each round all targets receive as much, so rounds take as long as the
  // bytes of one target do.
  for (const bool relays : {false, true}) {
    const JobLayout source = PlacedLayout(4, Shard(0));
    const JobLayout target = PlacedLayout(4, Placement());
    ASSERT_OK_AND_ASSIGN(const Plan plan,
                         BuildPlan(source, target, {}, nullptr, {.relays = relays}));
    ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(source, target, {}, plan));
    EXPECT_EQ(figures.schedule_bytes, std::uint64_t{1} << 20);
  }
}

}  // namespace
}  // namespace tensorbus::planner
