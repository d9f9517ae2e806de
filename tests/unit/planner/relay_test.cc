#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "planner/certificate.h"
#include "planner/relay_trees.h"
#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/checked_plan.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsStatus;

/// Nodes of these sizes, ranks numbered through.
std::vector<std::vector<std::uint32_t>> NodesOf(const std::vector<std::uint32_t>& sizes) {
  std::vector<std::vector<std::uint32_t>> nodes;
  std::uint32_t next = 0;
  for (const std::uint32_t size : sizes) {
    auto& node = nodes.emplace_back(size);
    std::iota(node.begin(), node.end(), next);
    next += size;
  }
  return nodes;
}

/// All ways to fill up to three nodes with one to four ranks, and some larger ones.
std::vector<std::vector<std::uint32_t>> NodeSizes() {
  std::vector<std::vector<std::uint32_t>> all = {{8, 8, 8, 8}, {8, 7}, {8, 7, 5, 3}};
  for (std::uint32_t a = 1; a <= 4; ++a) {
    all.push_back({a});
    for (std::uint32_t b = 1; b <= 4; ++b) {
      all.push_back({a, b});
      for (std::uint32_t c = 1; c <= 4; ++c) all.push_back({a, b, c});
    }
  }
  return all;
}

TEST(RelayTrees, EveryTreeReachesEveryRankAfterItsSenderAndEveryNodeOnce) {
  for (const std::vector<std::uint32_t>& sizes : NodeSizes()) {
    for (const bool root_first : {false, true}) {
      const auto nodes = NodesOf(sizes);
      std::map<std::uint32_t, std::size_t> node_of;
      for (std::size_t n = 0; n < nodes.size(); ++n) {
        for (const std::uint32_t rank : nodes[n]) node_of[rank] = n;
      }
      const RelayTrees trees(nodes, root_first);
      for (std::size_t tree = 0; tree < trees.count(); ++tree) {
        std::map<std::uint32_t, std::uint32_t> hops;  // of the ranks that have the bytes
        std::vector<int> entered(nodes.size());
        for (const RelayStep& step : trees.Steps(tree)) {
          if (step.hop == 0) {
            EXPECT_TRUE(hops.empty()) << "a source sends once";
            EXPECT_TRUE(!root_first || node_of[step.target] == 0);
          } else {
            ASSERT_TRUE(hops.contains(step.sender));
            EXPECT_EQ(step.hop, hops[step.sender] + 1);
          }
          if (step.hop == 0 || node_of[step.sender] != node_of[step.target])
            ++entered[node_of[step.target]];
          EXPECT_TRUE(hops.emplace(step.target, step.hop).second) << "received twice";
        }
        EXPECT_EQ(hops.size(), node_of.size());
        EXPECT_THAT(entered, Each(1));
      }
    }
  }
}

TEST(RelayTrees, NobodySendsOnMoreThanItReceives) {
  for (const std::vector<std::uint32_t>& sizes : NodeSizes()) {
    const RelayTrees trees(NodesOf(sizes), false);
    std::map<std::uint32_t, std::size_t> sends;
    for (std::size_t tree = 0; tree < trees.count(); ++tree) {
      for (const RelayStep& step : trees.Steps(tree)) sends[step.sender] += step.hop > 0 ? 1 : 0;
    }
    // Each rank receives once per tree. Where the turns cannot be even, 5 in 100 are allowed.
    for (const auto& [rank, count] : sends)
      EXPECT_LE(count * 100, trees.count() * 105) << "rank " << rank << " of " << sizes.size();
  }
}

TEST(RelayTrees, WhoIsLostIsLeftOutOfTheTreesThatThereWere) {
  for (const bool root_first : {false, true}) {
    const RelayTrees before(NodesOf({8, 8, 8, 8}), root_first);
    const std::vector<std::uint32_t> lost = {3, 9, 30};
    const RelayTrees trees(NodesOf({8, 8, 8, 8}), root_first, lost);
    EXPECT_EQ(trees.count(), before.count());
    std::map<std::uint32_t, std::size_t> sends;
    for (std::size_t tree = 0; tree < trees.count(); ++tree) {
      std::map<std::uint32_t, std::uint32_t> hops;  // of the ranks that have the bytes
      for (const RelayStep& step : trees.Steps(tree)) {
        EXPECT_FALSE(std::binary_search(lost.begin(), lost.end(), step.target));
        if (step.hop > 0) {
          ASSERT_TRUE(hops.contains(step.sender));
          EXPECT_EQ(step.hop, hops[step.sender] + 1);
          ++sends[step.sender];
        }
        EXPECT_TRUE(hops.emplace(step.target, step.hop).second) << "received twice";
      }
      EXPECT_EQ(hops.size(), 32 - lost.size());
    }
    for (const auto& [rank, count] : sends)
      EXPECT_LE(count * 100, trees.count() * 110) << "rank " << rank;
  }
}

TEST(RelayTrees, EveryRankReceivesAsMuchOfEachHop) {
  const RelayTrees trees(NodesOf({4, 4, 4}), false);
  EXPECT_EQ(trees.count(), 12U);
  std::map<std::uint32_t, std::map<std::uint32_t, int>> received;  // by hop and rank
  for (std::size_t tree = 0; tree < trees.count(); ++tree) {
    for (const RelayStep& step : trees.Steps(tree)) ++received[step.hop][step.target];
  }
  EXPECT_EQ(received.size(), 6U);  // two more nodes, three more ranks
  for (const auto& [hop, ranks] : received) {
    EXPECT_EQ(ranks.size(), 12U) << "hop " << hop;
    for (const auto& [rank, count] : ranks) EXPECT_EQ(count, ranks.begin()->second);
  }
}

JobLayout Rows(std::uint32_t ranks, const std::vector<TensorSpec>& specs) {
  const std::vector<Placement> placements = {Shard(0)};
  return JobOf(ranks, specs, Resolve(Mesh({ranks}), placements, specs[0].shape, ranks).value());
}

JobLayout Whole(std::uint32_t ranks, const std::vector<TensorSpec>& specs) {
  const std::vector<Placement> placements = {Placement()};
  return JobOf(ranks, specs, Resolve(Mesh({ranks}), placements, specs[0].shape, ranks).value());
}

std::uint64_t Sum(const std::vector<std::uint64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::uint64_t{0});
}

TEST(Relays, BytesLeaveTheSourcesOnceAndEnterEachNodeOnce) {
  const std::vector<TensorSpec> specs = {{"a", DType::kBf16, MakeShape({4096, 4096})}};
  const JobLayout source = Rows(4, specs);
  const JobLayout target = Whole(16, specs);
  const Topology topology = DefaultTopology(4, 16, false);
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                       MakeCheckedPlan(source, target, topology, {.relays = true}));
  const PlanFigures& figures = made.figures;
  constexpr std::uint64_t kBytes = 32 << 20;
  EXPECT_THAT(figures.send_bytes, Each(kBytes / 4));
  EXPECT_THAT(figures.recv_bytes, Each(kBytes));
  EXPECT_THAT(figures.node_in_bytes, ElementsAre(kBytes, kBytes));
  EXPECT_EQ(Sum(figures.relay_bytes), 15 * kBytes);
  EXPECT_LE(figures.max_send_bytes, kBytes);
  EXPECT_EQ(figures.lower_bound_bytes, kBytes);
  // Without relays each of the four sources sends 16 times its quarter.
  ASSERT_OK_AND_ASSIGN(const Plan direct, BuildPlan(source, target, topology));
  ASSERT_OK_AND_ASSIGN(const PlanFigures sent, FiguresOf(source, target, topology, direct));
  EXPECT_EQ(sent.lower_bound_bytes, 4 * kBytes);
}

TEST(Relays, NodesThatHaveTheBytesFeedThemselvesAndOneOfThemTheOthers) {
  // Two nodes hold the tensor, the third does not.
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({1024, 1024})}};
  const JobLayout source = Whole(2, specs);
  const JobLayout target = Whole(6, specs);
  Topology topology;
  topology.nodes = {{{0}, {0, 1}}, {{1}, {2, 3}}, {{}, {4, 5}}};
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                       MakeCheckedPlan(source, target, topology, {.relays = true}));
  const PlanFigures& figures = made.figures;
  EXPECT_THAT(figures.send_bytes, ElementsAre(4 << 20, 4 << 20));
  EXPECT_THAT(figures.node_in_bytes, ElementsAre(0, 0, 4 << 20));
}

TEST(Relays, WhatIsOnTheDeviceIsNeitherReceivedNorPassedOn) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({1024, 1024})}};
  const JobLayout source = Rows(4, specs);
  const JobLayout target = Whole(4, specs);
  const Topology topology = DefaultTopology(4, 4, true);
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                       MakeCheckedPlan(source, target, topology, {.relays = true}));
  const PlanFigures& figures = made.figures;
  constexpr std::uint64_t kQuarter = 1 << 20;
  EXPECT_THAT(figures.local_bytes, Each(kQuarter));
  EXPECT_THAT(figures.recv_bytes, Each(3 * kQuarter));
  EXPECT_THAT(figures.send_bytes, Each(kQuarter));
  EXPECT_THAT(figures.node_in_bytes, ElementsAre(0));
  // A device sends its own quarter and passes two thirds of the others' on.
  EXPECT_LE(figures.max_send_bytes, 3 * kQuarter + (64 << 10));
}

TEST(Relays, BoxesOfTargetsThatOverlapAreSentOnce) {
  const std::vector<TensorSpec> specs = {{"a", DType::kU8, MakeShape({9})}};
  const JobLayout source = Whole(1, specs);
  const JobLayout target =
      JobOf(2, specs, Holding{{{0, {MakeBox({{0, 6}})}}, {1, {MakeBox({{3, 9}})}}}});
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made,
                       MakeCheckedPlan(source, target, {}, {.relays = true}));
  const PlanFigures& figures = made.figures;
  EXPECT_EQ(ElementFault(source, target, made.plan), "");
  EXPECT_THAT(figures.send_bytes, ElementsAre(9));
  EXPECT_EQ(Sum(figures.relay_bytes), 3U);
  EXPECT_EQ(figures.lower_bound_bytes, 9U);
}

TEST(Relays, WithoutATargetThePlanIsNoLargerAndAsGood) {
  // 7 ranks of a node and 8 of the others have 56 for their least common multiple: trees that suit
  // them alone would cut everything into many more parts.
  const std::vector<TensorSpec> specs = {{"a", DType::kBf16, MakeShape({8192, 8192})}};
  const JobLayout source = Rows(4, specs);
  const JobLayout target = Whole(32, specs);
  const Topology topology = DefaultTopology(4, 32, false);
  ASSERT_OK_AND_ASSIGN(const Plan before,
                       BuildPlan(source, target, topology, nullptr, {.relays = true}));
  const PlanOptions options = {.relays = true, .lost = {.sources = {}, .targets = {11}}};
  ASSERT_OK_AND_ASSIGN(const CheckedPlan made, MakeCheckedPlan(source, target, topology, options));
  const PlanFigures& figures = made.figures;
  EXPECT_LE(made.plan.ops.size(), before.ops.size());
  constexpr std::uint64_t kBytes = 128 << 20;
  EXPECT_THAT(figures.send_bytes, Each(kBytes / 4));
  EXPECT_THAT(figures.node_in_bytes, Each(kBytes));
  EXPECT_LE(figures.max_send_bytes, kBytes / 10 * 11);
}

TEST(Relays, DigestIsTheSameEverywhere) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({12, 10})},
                                         {"b", DType::kF32, MakeShape({12, 10})}};
  ASSERT_OK_AND_ASSIGN(const Plan plan,
                       BuildPlan(Rows(4, specs), Whole(3, specs), {}, nullptr, {.relays = true}));
  // Agents compare digests: a change of this value is a change of the plan format.
  EXPECT_EQ(plan.digest.ToHex(), "e8d612ba399ff915997fa9776b163a8d");
}

/// One tensor of three rows, from one source along three targets; the first row to target 0, on to
/// target 1, on to target 2, the others begun by targets 1 and 2.
class RelayCertificateTest : public ::testing::Test {
 protected:
  RelayCertificateTest() {
    for (std::uint64_t row = 0; row < 3; ++row) plan_.boxes.push_back(MakeBox({{row, row + 1}}));
    for (std::uint32_t target = 0; target < 3; ++target) {
      const std::uint32_t before = (target + 2) % 3;
      AddRoute({.source = 0, .target = target, .round = target}, target);
      AddRoute({.source = before, .target = target, .relayed = true, .round = 3}, before);
      AddRoute({.source = before, .target = target, .relayed = true, .round = 4}, (target + 1) % 3);
    }
    plan_.round_count = 5;
  }

  void AddRoute(Route route, std::uint32_t box) {
    route.first_op = plan_.ops.size();
    route.op_count = 1;
    route.bytes = 4;
    plan_.routes.push_back(route);
    plan_.ops.push_back({0, box});
  }

  Status After(const std::function<void(Plan&)>& change) const {
    Plan plan = plan_;
    change(plan);
    return CheckPlan(source_, target_, {}, plan).status();
  }

  std::vector<TensorSpec> specs_ = {{"a", DType::kF32, MakeShape({3})}};
  JobLayout source_ = Whole(1, specs_);
  JobLayout target_ = Whole(3, specs_);
  Plan plan_;
};

TEST_F(RelayCertificateTest, ProvesWhatIsPassedOnAfterItArrived) {
  ASSERT_OK_AND_ASSIGN(const Certificate certificate, CheckPlan(source_, target_, {}, plan_));
  EXPECT_EQ(certificate.bytes, 36U);
  EXPECT_EQ(certificate.op_count, 9U);
}

TEST_F(RelayCertificateTest, RelayingBeforeArrivalIsSeen) {
  // Target 0 passes row 2 on in round 4, and now gets it in that same round.
  const Status status = After([](Plan& plan) {
    plan.routes[1].round = 4;
    plan.routes[2].round = 3;
    std::swap(plan.routes[1], plan.routes[2]);
    std::swap(plan.ops[1], plan.ops[2]);
    plan.routes[1].first_op = 1;
    plan.routes[2].first_op = 2;
  });
  EXPECT_THAT(status, IsStatus(Code::kInternal, Reason::kPlanMismatch));
  EXPECT_THAT(status.message(),
              HasSubstr("tensor 'a': target 0 passes box [2:3] on to target 1 in round 4, before "
                        "all of it has arrived"));
}

TEST_F(RelayCertificateTest, TheWrongRelayRankIsSeen) {
  // Target 1 has row 2 only after round 4.
  EXPECT_THAT(After([](Plan& plan) {
                plan.routes[1].source = 1;
                plan.routes[1].round = 2;
              }).message(),
              HasSubstr("target 1 passes box [2:3] on to target 0 in round 2, before all of it"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes[2].source = 7; }).message(),
              HasSubstr("no such rank"));
}

TEST_F(RelayCertificateTest, RelayingWhatWasNeverReceivedIsSeen) {
  // Target 1 has row 1 from its own device: it may copy it there, but its first hop is a source's.
  Topology topology;
  topology.same_device = {{0, 1}};
  Plan plan;
  plan.boxes = {MakeBox({{0, 3}})};
  plan.round_count = 2;
  plan_ = plan;
  AddRoute({.source = 1, .target = 0, .relayed = true, .round = 1}, 0);
  AddRoute({.source = 0, .target = 1, .local = true}, 0);
  AddRoute({.source = 0, .target = 2, .round = 0}, 0);
  for (Route& route : plan_.routes) route.bytes = 12;
  EXPECT_THAT(CheckPlan(source_, target_, topology, plan_).status().message(),
              HasSubstr("target 1 passes box [0:3] on to target 0 in round 1, but never receives"));
  // From target 2, which receives it, all is well.
  plan_.routes[0].source = 2;
  EXPECT_OK(CheckPlan(source_, target_, topology, plan_));
}

TEST_F(RelayCertificateTest, RelayingATensorThatIsNotOnesOwnIsSeen) {
  const Box whole = MakeBox({{0, 3}});
  const JobLayout target = JobOf(3, specs_, Holding{{{0, {whole}}, {2, {whole}}}});
  plan_ = {};
  plan_.boxes = {whole};
  plan_.round_count = 2;
  AddRoute({.source = 1, .target = 0, .relayed = true, .round = 1}, 0);
  AddRoute({.source = 0, .target = 2, .round = 0}, 0);
  for (Route& route : plan_.routes) route.bytes = 12;
  EXPECT_THAT(CheckPlan(source_, target, {}, plan_).status().message(),
              HasSubstr("target 1 passes box [0:3] on to target 0 in round 1, but never receives"));
}

TEST_F(RelayCertificateTest, ARoundTripIsSeenWhateverTheRounds) {
  // Targets 0 and 1 get all of the tensor from each other.
  for (const auto& [first, second] : {std::pair(1U, 1U), std::pair(1U, 2U), std::pair(2U, 1U)}) {
    Plan plan;
    plan.boxes = {MakeBox({{0, 3}})};
    plan.round_count = 3;
    plan_ = plan;
    AddRoute({.source = 1, .target = 0, .relayed = true, .round = first}, 0);
    AddRoute({.source = 0, .target = 1, .relayed = true, .round = second}, 0);
    AddRoute({.source = 0, .target = 2, .round = 0}, 0);
    for (Route& route : plan_.routes) route.bytes = 12;
    EXPECT_THAT(CheckPlan(source_, target_, {}, plan_).status().message(),
                HasSubstr("before all of it has arrived"));
  }
}

TEST_F(RelayCertificateTest, APartThatArrivedIsNotTheWhole) {
  const Status status = After([](Plan& plan) {
    // Target 0 gets rows 1 and 2 in one box from target 2, which has row 1 only in round 3.
    plan.boxes.push_back(MakeBox({{1, 3}}));
    std::sort(plan.boxes.begin(), plan.boxes.end());  // [0:1] [1:2] [1:3] [2:3]
    for (RouteOp& op : plan.ops) op.box = op.box == 2 ? 3 : op.box;
    plan.ops.erase(plan.ops.begin() + 2);
    plan.routes.erase(plan.routes.begin() + 2);
    plan.ops[1].box = 2;
    plan.routes[1].bytes = 8;
    for (std::size_t r = 2; r < plan.routes.size(); ++r) --plan.routes[r].first_op;
  });
  EXPECT_THAT(status.message(), HasSubstr("target 2 passes box [1:3] on to target 0 in round 3"));
}

TEST_F(RelayCertificateTest, RelayedIsNeverLocalAndRoundsAreNotShared) {
  EXPECT_FALSE(After([](Plan& plan) { plan.routes[1].local = true; }).ok());
  EXPECT_THAT(After([](Plan& plan) { plan.routes[1].round = 4; }).message(),
              HasSubstr("out of order or repeated"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes[3].round = 3; }).message(), HasSubstr("is taken"));
}

}  // namespace
}  // namespace tensorbus::planner
