#include <algorithm>
#include <functional>
#include <tuple>

#include "planner/certificate.h"
#include "planner/class_plan.h"
#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

class PartTest : public ::testing::Test {
 protected:
  PartTest() : pair_(SmallModel(3)), topology_(DefaultTopology(6, 4, true)) {
    match_ = MatchLayouts(pair_.source, pair_.target, {}, nullptr).value();
    classes_ = BuildClassPlan(match_, topology_).value();
    plan_ = WriteOut(classes_);
  }

  JobPair pair_;
  Topology topology_;
  LayoutMatch match_;
  ClassPlan classes_;
  Plan plan_;
};

TEST_F(PartTest, HasTheRoutesOfItsRanksAndNoOthers) {
  for (const RankSelection& ranks : std::vector<RankSelection>{
           {{}, {}}, {{0}, {}}, {{}, {3}}, {{1, 4}, {0, 2}}, {{0, 1, 2, 3, 4, 5}, {}}}) {
    const Plan part = PlanForRanks(classes_, ranks);
    EXPECT_EQ(part.digest, plan_.digest);
    EXPECT_EQ(part.round_count, plan_.round_count);
    std::vector<CopyOp> expected;
    std::vector<Route> routes;
    for (const Route& route : plan_.routes) {
      const bool own = std::count(ranks.sources.begin(), ranks.sources.end(), route.source) != 0 ||
                       std::count(ranks.targets.begin(), ranks.targets.end(), route.target) != 0;
      if (!own) continue;
      routes.push_back(route);
      for (const CopyOp& op : OpsOf(plan_, route)) expected.push_back(op);
    }
    EXPECT_EQ(AllOps(part), expected);
    ASSERT_EQ(part.routes.size(), routes.size());
    for (std::size_t r = 0; r < routes.size(); ++r) {
      routes[r].first_op = part.routes[r].first_op;  // the only thing that may differ
      EXPECT_EQ(part.routes[r], routes[r]);
    }
    EXPECT_OK(CheckPart(pair_.source, pair_.target, topology_, part, ranks));
  }
}

/// What a class plan says of one of its routes, by tensor, then box.
std::vector<CopyOp> OpsSaid(const ClassPlan& classes, std::uint32_t number) {
  const Route& route = classes.routes[number];
  std::vector<CopyOp> ops;
  for (std::size_t c = 0; c < classes.classes.size(); ++c) {
    for (const Passage& p : classes.passages[c]) {
      const auto path = classes.paths[p.path];
      if (std::count(path.begin(), path.end(), number) == 0) continue;
      for (std::uint32_t i = p.first; i < p.last; ++i) {
        ops.push_back({classes.classes[c].tensors[i], route.source, route.target, route.local,
                       route.relayed, classes.boxes[p.box]});
      }
    }
  }
  std::sort(ops.begin(), ops.end(), [](const CopyOp& a, const CopyOp& b) {
    return std::tie(a.tensor, a.box) < std::tie(b.tensor, b.box);
  });
  return ops;
}

/// Ops per run of tensors: few and many are written in different ways.
std::uint64_t OpsPerRun(const ClassPlan& classes, const Plan& plan) {
  std::uint64_t runs = 0;
  for (const std::vector<Passage>& passages : classes.passages) {
    for (const Passage& p : passages) runs += classes.paths[p.path].size();
  }
  return plan.ops.size() / runs;
}

TEST(WriteOut, SaysOfEachRouteWhatTheClassPlanSays) {
  for (const std::uint32_t layers : {3U, 200U}) {
    const JobPair pair = SmallModel(layers);
    const Topology topology = DefaultTopology(6, 4, true);
    for (const bool relays : {false, true}) {
      SCOPED_TRACE(::testing::Message() << layers << " layers, relays " << relays);
      const PlanOptions options = {.relays = relays};
      ASSERT_OK_AND_ASSIGN(const LayoutMatch match,
                           MatchLayouts(pair.source, pair.target, options, nullptr));
      ASSERT_OK_AND_ASSIGN(const ClassPlan classes,
                           BuildClassPlan(match, topology, nullptr, options));
      std::vector<std::vector<CopyOp>> said;
      for (std::uint32_t r = 0; r < classes.routes.size(); ++r) said.push_back(OpsSaid(classes, r));
      const auto said_of = [&](const RankSelection& ranks) {
        std::vector<CopyOp> ops;
        for (std::size_t r = 0; r < said.size(); ++r) {
          const Route& route = classes.routes[r];
          const auto& senders = route.relayed ? ranks.targets : ranks.sources;
          if (std::count(ranks.targets.begin(), ranks.targets.end(), route.target) != 0 ||
              std::count(senders.begin(), senders.end(), route.source) != 0) {
            ops.insert(ops.end(), said[r].begin(), said[r].end());
          }
        }
        return ops;
      };
      const Plan plan = WriteOut(classes);
      EXPECT_TRUE(AllOps(plan) == said_of({{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3}}));
      // A part of few ranks has gaps, tensors of a class that it does not touch.
      std::vector<RankSelection> parts = {{{1}, {2}}, {{0, 5}, {1, 3}}};
      for (std::uint32_t rank = 0; rank < 6; ++rank) parts.push_back({{rank}, {}});
      for (std::uint32_t rank = 0; rank < 4; ++rank) parts.push_back({{}, {rank}});
      for (const RankSelection& ranks : parts)
        EXPECT_TRUE(AllOps(PlanForRanks(classes, ranks)) == said_of(ranks));
      EXPECT_EQ(OpsPerRun(classes, plan) >= 32, layers == 200);
      EXPECT_OK(CheckPlan(pair.source, pair.target, topology, plan));
    }
  }
}

TEST_F(PartTest, CertificatesOfAllTargetsProveAllBytes) {
  ASSERT_OK_AND_ASSIGN(const Certificate whole,
                       CheckPlan(pair_.source, pair_.target, topology_, plan_));
  std::uint64_t bytes = 0;
  for (std::uint32_t rank = 0; rank < pair_.target.rank_count; ++rank) {
    const RankSelection own = {{}, {rank}};
    ASSERT_OK_AND_ASSIGN(const Certificate part, CheckPart(pair_.source, pair_.target, topology_,
                                                           PlanForRanks(classes_, own), own));
    bytes += part.bytes;
  }
  EXPECT_EQ(bytes, whole.bytes);
}

TEST_F(PartTest, ASendersCertificateSeesWhatItSends) {
  const RankSelection own = {{1}, {}};
  const Plan part = PlanForRanks(classes_, own);
  const auto after = [&](const std::function<void(std::vector<CopyOp>&)>& change) {
    std::vector<CopyOp> ops = AllOps(part);
    change(ops);
    const Plan changed = PlanOf(ops, pair_.target);
    return CheckPart(pair_.source, pair_.target, topology_, changed, own).status().message();
  };
  EXPECT_EQ(after([](std::vector<CopyOp>&) {}), "");
  EXPECT_THAT(after([](std::vector<CopyOp>& ops) {
                ops[0].box[0].lo += 1;
                ops[0].box[0].hi += 3;
              }),
              HasSubstr("not inside one box that the source holds"));
  EXPECT_THAT(after([](std::vector<CopyOp>& ops) {
                for (CopyOp& op : ops) {
                  if (op.target == ops[0].target) op.source = 2;
                }
              }),
              HasSubstr("neither is one of the part's ranks"));
  // Source 1 holds experts 0 and 2 whole, but target 1 asked for neither.
  EXPECT_THAT(after([&](std::vector<CopyOp>& ops) {
                const auto moved = std::find_if(ops.begin(), ops.end(), [&](const CopyOp& op) {
                  return pair_.target.tensors[op.tensor].spec.name.find("experts") !=
                         std::string::npos;
                });
                ASSERT_NE(moved, ops.end());
                const CopyOp one = *moved;
                ops.assign(1, one);
                ops[0].target = one.target == 0 ? 2 : 0;
                ops[0].local = false;
              }),
              HasSubstr("not inside one box that the target asked for"));
}

JobLayout Without(JobLayout job, std::uint32_t rank) {
  for (Holding& holding : job.holdings)
    std::erase_if(holding.ranks, [&](const RankBoxes& held) { return held.rank == rank; });
  return job;
}

/// Only what others hold too can be lost: source 5 gets all that source 4 holds alone.
JobPair WithAnHeir(JobPair pair) {
  for (Holding& holding : pair.source.holdings) {
    const auto lost = std::find_if(holding.ranks.begin(), holding.ranks.end(),
                                   [](const RankBoxes& held) { return held.rank == 4; });
    if (lost == holding.ranks.end()) continue;
    const auto heir = std::find_if(holding.ranks.begin(), holding.ranks.end(),
                                   [](const RankBoxes& held) { return held.rank == 5; });
    if (heir == holding.ranks.end()) {
      holding.ranks.push_back({5, lost->boxes});
    } else if (heir->boxes != lost->boxes) {
      heir->boxes.insert(heir->boxes.end(), lost->boxes.begin(), lost->boxes.end());
    }
  }
  return pair;
}

TEST_F(PartTest, PlanningAgainWithoutARankIsPlanningWithoutWhatItHolds) {
  const JobPair pair = WithAnHeir(pair_);
  ASSERT_OK(Validate(pair.source));
  const std::vector<RankSelection> losses = {{{4}, {}}, {{}, {2}}, {{4}, {0, 3}}};
  for (const bool relays : {false, true}) {
    const PlanOptions before = {.relays = relays};
    ASSERT_OK_AND_ASSIGN(const LayoutMatch match,
                         MatchLayouts(pair.source, pair.target, before, nullptr));
    ASSERT_OK_AND_ASSIGN(const Plan old,
                         BuildPlan(pair.source, pair.target, topology_, nullptr, before));
    for (const RankSelection& lost : losses) {
      const PlanOptions options = {.relays = relays, .lost = lost};
      ASSERT_OK_AND_ASSIGN(const ClassPlan classes,
                           BuildClassPlan(match, topology_, nullptr, options));
      const Plan plan = WriteOut(classes);
      EXPECT_OK(CheckPlan(pair.source, pair.target, topology_, plan, lost));
      JobPair left = pair;
      for (const std::uint32_t rank : lost.sources) left.source = Without(left.source, rank);
      for (const std::uint32_t rank : lost.targets) left.target = Without(left.target, rank);
      EXPECT_EQ(ElementFault(left.source, left.target, plan), "");
      EXPECT_EQ(RelayFault(left.target, plan), "");
      ASSERT_OK_AND_ASSIGN(const Plan fresh,
                           BuildPlan(left.source, left.target, topology_, nullptr, before));
      if (!relays) {  // what is cut where targets overlap, and groups of targets, stay as they were
        EXPECT_TRUE(AllOps(plan) == AllOps(fresh));
        EXPECT_TRUE(plan.routes == fresh.routes);
        EXPECT_EQ(plan.digest, fresh.digest);
      }
      // What the lost ranks needed counts no more.
      ASSERT_OK_AND_ASSIGN(const PlanFigures figures,
                           FiguresOf(pair.source, pair.target, topology_, plan));
      ASSERT_OK_AND_ASSIGN(const PlanFigures wanted,
                           FiguresOf(left.source, left.target, topology_, fresh));
      EXPECT_EQ(figures.unique_bytes, wanted.unique_bytes);
      EXPECT_EQ(figures.lower_bound_bytes, wanted.lower_bound_bytes);
      EXPECT_EQ(figures.recv_bytes, wanted.recv_bytes);
      ASSERT_OK_AND_ASSIGN(const std::uint64_t port,
                           LeastPortBytes(pair.source, pair.target, topology_, options));
      ASSERT_OK_AND_ASSIGN(const std::uint64_t port_wanted,
                           LeastPortBytes(left.source, left.target, topology_, before));
      EXPECT_EQ(port, port_wanted);
      // A plan that still counts on the lost rank is refused.
      EXPECT_THAT(CheckPlan(pair.source, pair.target, topology_, old, lost).status().message(),
                  HasSubstr("one of them is lost"));
    }
  }
}

TEST_F(PartTest, WhatOnlyALostRankHeldIsNamed) {
  for (const bool relays : {false, true}) {
    PlanOptions options = {.relays = relays};
    ASSERT_OK_AND_ASSIGN(const LayoutMatch match,
                         MatchLayouts(pair_.source, pair_.target, options, nullptr));
    options.lost.sources = {2};
    PlanFault fault;
    EXPECT_THAT(BuildClassPlan(match, topology_, &fault, options),
                IsStatus(Code::kFailedPrecondition, Reason::kNoHolder));
    EXPECT_EQ(fault.tensor, "layers.0.q");
    EXPECT_EQ(fault.rank, 0U);
    EXPECT_EQ(fault.box, MakeBox({{6, 7}, {0, 12}}));
    options.lost.sources = {6};
    EXPECT_THAT(BuildClassPlan(match, topology_, &fault, options),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  }
}

}  // namespace
}  // namespace tensorbus::planner
