#include "planner/plan.h"

#include <cmath>
#include <map>
#include <rapidcheck.h>
#include <set>

#include "planner/certificate.h"
#include "planner/class_plan.h"
#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsStatus;

struct Placed {
  DeviceMesh mesh;
  std::vector<Placement> placements;
};

/// Every placement on every mesh of at most four ranks.
std::vector<Placed> AllPlacements(int dims) {
  std::vector<Placement> kinds = {Placement()};
  for (int d = 0; d < dims; ++d) kinds.push_back(Shard(d));
  if (dims > 0) kinds.push_back(Strided(0, 2));
  std::vector<Placed> all;
  for (const std::uint32_t size : {1U, 2U, 3U, 4U}) {
    for (const Placement& kind : kinds) all.push_back({Mesh({size}), {kind}});
  }
  for (const Placement& first : kinds) {
    for (const Placement& second : kinds) all.push_back({Mesh({2, 2}), {first, second}});
  }
  return all;
}

TEST(BuildPlan, EveryPairOfSmallMeshesIsRightElementByElement) {
  for (const std::vector<std::uint64_t>& dims :
       std::vector<std::vector<std::uint64_t>>{{}, {5}, {4, 3}, {0, 2}}) {
    const Shape shape = MakeShape(dims);
    const std::vector<Placed> all = AllPlacements(shape.rank());
    for (const Placed& from : all) {
      const std::uint32_t sources = RanksOf(from.mesh);
      const JobLayout source = JobOf(sources, {{"a", DType::kF16, shape}},
                                     Resolve(from.mesh, from.placements, shape, sources).value());
      for (const Placed& to : all) {
        const std::uint32_t targets = RanksOf(to.mesh);
        const JobLayout target = JobOf(targets, {{"a", DType::kF16, shape}},
                                       Resolve(to.mesh, to.placements, shape, targets).value());
        for (const bool colocated : {false, true}) {
          const Topology topology = DefaultTopology(sources, targets, colocated);
          for (const bool relays : {false, true}) {
            ASSERT_OK_AND_ASSIGN(const Plan plan,
                                 BuildPlan(source, target, topology, nullptr, {.relays = relays}));
            ASSERT_EQ(ElementFault(source, target, plan), "") << shape.ToString();
            ASSERT_EQ(RelayFault(target, plan), "") << shape.ToString();
            ASSERT_OK(CheckPlan(source, target, topology, plan));
          }
        }
      }
    }
  }
}

/// Random disjoint boxes dealt to ranks, several of them to more than one.
Holding RandomHolding(const Shape& shape, std::uint32_t ranks, bool everything) {
  std::vector<std::vector<Range>> cuts;
  for (const std::uint64_t n : shape.dims()) {
    const auto first = *rc::gen::inRange<std::uint64_t>(0, n + 1);
    const auto second = *rc::gen::inRange<std::uint64_t>(first, n + 1);
    cuts.push_back({{0, first}, {first, second}, {second, n}});
  }
  std::map<std::uint32_t, std::vector<Box>> boxes;
  const auto combinations = static_cast<std::uint32_t>(std::pow(3, shape.rank()));
  for (std::uint32_t c = 0; c < combinations; ++c) {
    std::vector<Range> ranges;
    std::uint32_t rest = c;
    for (const auto& cut : cuts) {
      ranges.push_back(cut[rest % 3]);
      rest /= 3;
    }
    const Box box(ranges);
    if (box.empty()) continue;
    const std::uint32_t owners = *rc::gen::inRange<std::uint32_t>(everything ? 1 : 0, 3);
    std::set<std::uint32_t> chosen;
    for (std::uint32_t i = 0; i < owners; ++i)
      chosen.insert(*rc::gen::inRange<std::uint32_t>(0, ranks));
    for (const std::uint32_t rank : chosen) boxes[rank].push_back(box);
  }
  Holding holding;
  for (auto& [rank, list] : boxes) holding.ranks.push_back({rank, std::move(list)});
  return holding;
}

/// Ranks dealt to two nodes, some to none.
std::vector<Topology::Node> RandomNodes(std::uint32_t sources, std::uint32_t targets) {
  std::vector<Topology::Node> nodes(3);
  for (std::uint32_t rank = 0; rank < sources; ++rank)
    nodes[*rc::gen::inRange<std::size_t>(0, 3)].source.push_back(rank);
  for (std::uint32_t rank = 0; rank < targets; ++rank)
    nodes[*rc::gen::inRange<std::size_t>(0, 3)].target.push_back(rank);
  nodes.pop_back();
  return nodes;
}

TEST(BuildPlan, RandomLayoutsAreRightElementByElement) {
  const bool fine = rc::check("plans move every element once", [] {
    const auto rank = *rc::gen::inRange(0, 4);
    std::vector<std::uint64_t> dims;
    for (int d = 0; d < rank; ++d) dims.push_back(*rc::gen::inRange<std::uint64_t>(1, 9));
    const Shape shape = MakeShape(dims);
    const auto sources = *rc::gen::inRange<std::uint32_t>(1, 7);
    const auto targets = *rc::gen::inRange<std::uint32_t>(1, 7);
    std::vector<TensorSpec> specs;
    const auto count = *rc::gen::inRange(1, 5);
    for (int i = 0; i < count; ++i) specs.push_back({std::to_string(i), DType::kF32, shape});
    const JobLayout source = JobOf(sources, specs, RandomHolding(shape, sources, true));
    const JobLayout target = JobOf(targets, specs, RandomHolding(shape, targets, false));
    RC_ASSERT(Validate(source).ok());
    Topology topology = DefaultTopology(sources, targets, *rc::gen::arbitrary<bool>());
    if (*rc::gen::arbitrary<bool>()) topology.nodes = RandomNodes(sources, targets);
    const bool relays = *rc::gen::arbitrary<bool>();
    const auto plan = BuildPlan(source, target, topology, nullptr, {.relays = relays});
    RC_ASSERT(plan.ok());
    RC_ASSERT(ElementFault(source, target, *plan) == "");
    RC_ASSERT(RelayFault(target, *plan) == "");
    RC_ASSERT(CheckPlan(source, target, topology, *plan).ok());
  });
  EXPECT_TRUE(fine);
}

JobLayout Rows(std::uint32_t ranks, std::vector<std::uint64_t> dims,
               std::vector<TensorSpec> specs) {
  const std::vector<Placement> placements = {Shard(0)};
  return JobOf(ranks, std::move(specs),
               Resolve(Mesh({ranks}), placements, MakeShape(dims), ranks).value());
}

JobLayout Whole(std::uint32_t ranks, std::vector<std::uint64_t> dims,
                std::vector<TensorSpec> specs) {
  const std::vector<Placement> placements = {Placement()};
  return JobOf(ranks, std::move(specs),
               Resolve(Mesh({ranks}), placements, MakeShape(dims), ranks).value());
}

TEST(BuildPlan, SharesTheWorkOfReplicatedSources) {
  // One large tensor, four holders: it must be cut, and evenly.
  const std::vector<TensorSpec> specs = {{"a", DType::kBf16, MakeShape({4096, 4096})}};
  const JobLayout source = Whole(4, {4096, 4096}, specs);
  const JobLayout target = Whole(1, {4096, 4096}, specs);
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, {}));
  ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(source, target, {}, plan));
  EXPECT_THAT(figures.send_bytes, ElementsAre(8 << 20, 8 << 20, 8 << 20, 8 << 20));
  EXPECT_EQ(figures.lower_bound_bytes, 32U << 20);
  EXPECT_OK(CheckPlan(source, target, {}, plan));
}

TEST(BuildPlan, PrefersSourcesOnTheTargetsNode) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({1000, 1000})}};
  const JobLayout both = Whole(2, {1000, 1000}, specs);
  Topology topology;
  topology.nodes = {{{1}, {0}}, {{0}, {1}}};
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(both, both, topology));
  for (const Route& route : plan.routes) EXPECT_NE(route.source, route.target);
  ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(both, both, topology, plan));
  EXPECT_THAT(figures.node_in_bytes, ElementsAre(0, 0));
}

TEST(BuildPlan, CopiesLocallyWhatIsOnTheDevice) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({8})}};
  const JobLayout source = Rows(2, {8}, specs);
  const JobLayout target = Whole(2, {8}, specs);
  const Topology topology = DefaultTopology(2, 2, true);
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, topology));
  ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(source, target, topology, plan));
  EXPECT_THAT(figures.local_bytes, ElementsAre(16, 16));
  EXPECT_THAT(figures.recv_bytes, ElementsAre(16, 16));
  EXPECT_THAT(figures.send_bytes, ElementsAre(16, 16));
  EXPECT_EQ(figures.unique_bytes, 32U);
}

TEST(BuildPlan, RoundsNeverAskARankForTwoThings) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({12, 10})}};
  const JobLayout source = Rows(4, {12, 10}, specs);
  const JobLayout target = Rows(3, {12, 10}, specs);
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, {}));
  std::set<std::pair<std::uint32_t, std::uint32_t>> sends;
  std::set<std::pair<std::uint32_t, std::uint32_t>> receives;
  for (const Route& route : plan.routes) {
    EXPECT_LT(route.round, plan.round_count);
    EXPECT_TRUE(sends.emplace(route.source, route.round).second);
    EXPECT_TRUE(receives.emplace(route.target, route.round).second);
    EXPECT_EQ(RouteOps(plan, route.source, route.target).size(), route.op_count);
  }
  EXPECT_EQ(plan.round_count, 2U);  // no target has more than two sources, no source more targets
  EXPECT_TRUE(RouteOps(plan, 3, 0).empty());
}

TEST(BuildPlan, DigestIsTheSameEverywhereAndTellsPlansApart) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({12, 10})},
                                         {"b", DType::kF32, MakeShape({12, 10})}};
  const JobLayout source = Rows(4, {12, 10}, specs);
  const JobLayout target = Whole(2, {12, 10}, specs);
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, {}));
  // Agents compare digests: a change of this value is a change of the plan format.
  EXPECT_EQ(plan.digest.ToHex(), "db078c80cbf38b78d3f83eabb97e1de1");
  JobLayout renamed = target;
  JobLayout renamed_source = source;
  renamed.tensors[1].spec.name = renamed_source.tensors[1].spec.name = "c";
  ASSERT_OK_AND_ASSIGN(const Plan other, BuildPlan(renamed_source, renamed, {}));
  EXPECT_NE(other.digest, plan.digest);
}

TEST(BuildPlan, RefusesWhatCannotBeWithDetails) {
  const std::vector<TensorSpec> specs = {{"layers.0.q.weight", DType::kF32, MakeShape({8})}};
  const JobLayout target = Whole(2, {8}, specs);
  PlanFault fault;

  JobLayout source = Rows(2, {8}, {{"layers.1.q.weight", DType::kF32, MakeShape({8})}});
  auto plan = BuildPlan(source, target, {}, &fault);
  EXPECT_THAT(plan, IsStatus(Code::kFailedPrecondition, Reason::kUnknownTensor));
  EXPECT_EQ(fault.tensor, "layers.0.q.weight");
  EXPECT_THAT(fault.near_names, ElementsAre("layers.1.q.weight"));
  EXPECT_THAT(plan.status().message(), HasSubstr("near: 'layers.1.q.weight'"));

  source = Rows(2, {8}, {{"layers.0.q.weight", DType::kF16, MakeShape({8})}});
  EXPECT_THAT(BuildPlan(source, target, {}, &fault),
              IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
  source = Rows(2, {9}, {{"layers.0.q.weight", DType::kF32, MakeShape({9})}});
  EXPECT_THAT(BuildPlan(source, target, {}, &fault),
              IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));

  source = Rows(2, {8}, specs);
  source.holdings[0].ranks[1].boxes[0][0] = {4, 6};
  plan = BuildPlan(source, target, {}, &fault);
  EXPECT_THAT(plan, IsStatus(Code::kFailedPrecondition, Reason::kNoHolder));
  EXPECT_EQ(fault.tensor, "layers.0.q.weight");
  EXPECT_EQ(fault.rank, 0U);
  EXPECT_EQ(fault.box, MakeBox({{6, 8}}));
  EXPECT_THAT(fault.near_ranks, ElementsAre(0, 1));
  EXPECT_THAT(plan.status().message(), HasSubstr("target rank 0 needs box [6:8]"));

  Topology topology;
  topology.same_device = {{7, 0}};
  EXPECT_THAT(BuildPlan(target, target, topology),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  topology.same_device.clear();
  topology.nodes = {{{0}, {}}, {{0}, {}}};
  EXPECT_THAT(BuildPlan(target, target, topology),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(BuildPlan, RefusesMoreBytesThanItCanCount) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 100; ++i)
    specs.push_back({std::to_string(i), DType::kU8, MakeShape({kMaxTensorBytes})});
  const JobLayout job = Whole(1, {kMaxTensorBytes}, specs);
  EXPECT_THAT(BuildPlan(job, job, {}), IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
}

TEST(BuildClassPlan, RefusesMoreOpsThanAPlanMayHave) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 5000; ++i) specs.push_back({std::to_string(i), DType::kU8, MakeShape({1})});
  const JobLayout source = Whole(1, {1}, specs);
  const JobLayout target = Whole(60'000, {1}, specs);
  ASSERT_OK_AND_ASSIGN(const LayoutMatch match, MatchLayouts(source, target, {}, nullptr));
  const auto plan = BuildClassPlan(match, {});
  EXPECT_THAT(plan, IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
  EXPECT_THAT(plan.status().message(), HasSubstr("300000000 copy ops"));
}

TEST(MatchLayouts, RefusesRowsAgainstColumnsOfTooManyRanksBeforeTheWork) {
  constexpr std::uint64_t kRanks = 65'536;
  const std::vector<TensorSpec> specs = {{"w", DType::kU8, MakeShape({kRanks, kRanks})}};
  const std::vector<Placement> columns = {Shard(1)};
  const JobLayout source = Rows(kRanks, {kRanks, kRanks}, specs);
  const JobLayout target =
      JobOf(kRanks, specs, Resolve(Mesh({kRanks}), columns, specs[0].shape, kRanks).value());
  for (const bool relays : {false, true}) {
    const auto match = MatchLayouts(source, target, {.relays = relays}, nullptr);
    EXPECT_THAT(match, IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
    EXPECT_THAT(match.status().message(), HasSubstr("tensor 'w'"));
    EXPECT_THAT(match.status().message(), HasSubstr("4294967296 parts"));  // that is all of them
  }
}

TEST(BuildPlan, RefusesRelaysThatPassOnTooOften) {
  // 4096 ranks on 512 nodes: so many trees, each with a copy for every rank.
  const std::vector<TensorSpec> specs = {{"w", DType::kF32, MakeShape({1 << 15, 1 << 14})}};
  const JobLayout source = Whole(1, {1 << 15, 1 << 14}, specs);
  const JobLayout target = Whole(4096, {1 << 15, 1 << 14}, specs);
  const auto plan =
      BuildPlan(source, target, DefaultTopology(1, 4096, false), nullptr, {.relays = true});
  EXPECT_THAT(plan, IsStatus(Code::kResourceExhausted, Reason::kUnsupported));
  EXPECT_THAT(plan.status().message(), HasSubstr("plan without relays"));
}

/// Two sources hold all of it, one of them on the node of target 0. Target 1 is elsewhere.
TEST(BuildPlan, BalancesWhatLeavesTheNodesByItself) {
  const std::vector<TensorSpec> specs = {{"a", DType::kU8, MakeShape({8 << 20})}};
  const JobLayout source = Whole(2, {8 << 20}, specs);
  const JobLayout target = Whole(2, {8 << 20}, specs);
  Topology topology;
  topology.nodes = {{{0}, {0}}, {{}, {1}}, {{1}, {}}};
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, topology));
  EXPECT_OK(CheckPlan(source, target, topology, plan));
  // Target 0 is served on its node. Counted together, source 1 alone would serve target 1, and the
  // port of its node would carry all of it; each source sends half instead.
  EXPECT_EQ(RouteOps(plan, 0, 0).size(), 1U);
  ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(source, target, topology, plan));
  EXPECT_THAT(figures.send_bytes, ElementsAre(12 << 20, 4 << 20));
  ASSERT_OK_AND_ASSIGN(const std::uint64_t least, LeastPortBytes(source, target, topology));
  EXPECT_EQ(least, 8U << 20);  // into target 1
}

TEST(FiguresOf, LostTargetsNeedNothing) {
  const std::vector<TensorSpec> specs = {{"a", DType::kU8, MakeShape({64})}};
  const JobLayout source = Whole(1, {64}, specs);
  const JobLayout target = Whole(3, {64}, specs);
  const PlanOptions options = {.relays = false, .lost = {.sources = {}, .targets = {2}}};
  ASSERT_OK_AND_ASSIGN(const Plan plan, BuildPlan(source, target, {}, nullptr, options));
  ASSERT_OK_AND_ASSIGN(const PlanFigures figures, FiguresOf(source, target, {}, plan));
  EXPECT_EQ(figures.lower_bound_bytes, 128U);  // the one source sends to two
}

TEST(LeastPortBytes, CountsWhatEachNodeLacks) {
  const std::vector<TensorSpec> specs = {{"a", DType::kU8, MakeShape({64})}};
  const JobLayout rows = Rows(4, {64}, specs);  // 16 bytes a source
  const JobLayout target = Whole(4, {64}, specs);
  Topology topology;
  topology.nodes = {{{0}, {0, 1}}, {{}, {2, 3}}};
  // Without relays every target gets what its node lacks: 48 or 64; sources 1 to 3 send 4 * 16.
  ASSERT_OK_AND_ASSIGN(const std::uint64_t direct, LeastPortBytes(rows, target, topology));
  EXPECT_EQ(direct, 64U);
  // With them the two of a node share it, 24 or 32 each; sources send 16; targets 0 and 1 pass on
  // the 16 of source 0.
  ASSERT_OK_AND_ASSIGN(const std::uint64_t relayed,
                       LeastPortBytes(rows, target, topology, {.relays = true}));
  EXPECT_EQ(relayed, 32U);
  // One source, one target there and one here: passed on by target 0 alone.
  topology.nodes = {{{0}, {0}}, {{}, {1}}};
  const JobLayout one = Whole(1, {64}, specs);
  const JobLayout two = Whole(2, {64}, specs);
  ASSERT_OK_AND_ASSIGN(const std::uint64_t chain,
                       LeastPortBytes(one, two, topology, {.relays = true}));
  EXPECT_EQ(chain, 64U);
  // Two on the other node share what comes in; target 0 still passes all of it on.
  topology.nodes = {{{0}, {0}}, {{}, {1, 2}}};
  ASSERT_OK_AND_ASSIGN(const std::uint64_t out,
                       LeastPortBytes(one, Whole(3, {64}, specs), topology, {.relays = true}));
  EXPECT_EQ(out, 64U);
  topology.nodes = {{{0}, {0}}, {{}, {1}}};
  topology.same_device = {{0, 0}, {0, 1}};
  ASSERT_OK_AND_ASSIGN(const std::uint64_t none, LeastPortBytes(one, two, topology));
  EXPECT_EQ(none, 0U);
}

}  // namespace
}  // namespace tensorbus::planner
