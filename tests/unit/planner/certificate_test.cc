#include "planner/certificate.h"

#include <functional>

#include "planner/tiling.h"
#include "planner/topology.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/planner/layouts_for_tests.h"

namespace tensorbus::planner {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

/// Two tensors, rows over three sources to columns over two targets, source 0 beside target 0.
class CertificateTest : public ::testing::Test {
 protected:
  CertificateTest() {
    const Shape shape = MakeShape({6, 4});
    const std::vector<TensorSpec> specs = {{"a", DType::kF32, shape}, {"b", DType::kF32, shape}};
    const std::vector<Placement> rows = {Shard(0)};
    const std::vector<Placement> columns = {Shard(1)};
    source_ = JobOf(3, specs, Resolve(Mesh({3}), rows, shape, 3).value());
    target_ = JobOf(2, specs, Resolve(Mesh({2}), columns, shape, 2).value());
    topology_.same_device = {{0, 0}};
    plan_ = BuildPlan(source_, target_, topology_).value();
  }

  /// What the certificate says of a changed plan.
  Status After(const std::function<void(Plan&)>& change) const {
    Plan plan = plan_;
    change(plan);
    return CheckPlan(source_, target_, topology_, plan).status();
  }
  /// The same when ops are changed and the rest is made to agree with them, as by a planner whose
  /// only fault is in its ops.
  Status AfterOps(const std::function<void(std::vector<CopyOp>&)>& change) const {
    std::vector<CopyOp> ops = AllOps(plan_);
    change(ops);
    return CheckPlan(source_, target_, topology_, PlanOf(ops, target_)).status();
  }

  JobLayout source_;
  JobLayout target_;
  Topology topology_;
  Plan plan_;
};

TEST_F(CertificateTest, ProvesAGoodPlan) {
  ASSERT_OK_AND_ASSIGN(const Certificate certificate,
                       CheckPlan(source_, target_, topology_, plan_));
  EXPECT_EQ(certificate.bytes, 2U * 6 * 4 * 4);
  EXPECT_EQ(certificate.op_count, plan_.ops.size());
}

TEST_F(CertificateTest, EveryDroppedOpIsMissed) {
  for (std::size_t i = 0; i < plan_.ops.size(); ++i) {
    const Status status = AfterOps(
        [&](std::vector<CopyOp>& ops) { ops.erase(ops.begin() + static_cast<std::ptrdiff_t>(i)); });
    EXPECT_THAT(status, IsStatus(Code::kInternal, Reason::kPlanMismatch));
    EXPECT_THAT(status.message(), HasSubstr("never written"));
  }
}

TEST_F(CertificateTest, EveryRepeatedOpIsSeen) {
  for (std::size_t i = 0; i < plan_.ops.size(); ++i) {
    const Status status = AfterOps([&](std::vector<CopyOp>& ops) {
      ops.insert(ops.begin() + static_cast<std::ptrdiff_t>(i), ops[i]);
    });
    EXPECT_THAT(status.message(), HasSubstr("out of order or repeated"));
  }
}

TEST_F(CertificateTest, EveryShiftedOrResizedOpIsSeen) {
  for (std::size_t i = 0; i < plan_.ops.size(); ++i) {
    for (int dim = 0; dim < 2; ++dim) {
      for (const int change : {-1, 1}) {
        for (const bool whole : {false, true}) {
          const Status status = AfterOps([&](std::vector<CopyOp>& ops) {
            Range& range = ops[i].box[dim];
            range.hi += static_cast<std::uint64_t>(change);
            if (whole) range.lo += static_cast<std::uint64_t>(change);
          });
          EXPECT_FALSE(status.ok()) << i << " dim " << dim << " by " << change;
        }
      }
    }
  }
}

TEST_F(CertificateTest, WrongRanksTensorsAndFlagsAreNamed) {
  EXPECT_THAT(AfterOps([](std::vector<CopyOp>& ops) {
                std::swap(ops[3].box, ops[5].box);  // of sources 1 and 2
              }).message(),
              HasSubstr("not inside one box that the source holds"));
  EXPECT_THAT(AfterOps([](std::vector<CopyOp>& ops) { ops.back().source = 3; }).message(),
              HasSubstr("no such rank"));
  EXPECT_THAT(AfterOps([](std::vector<CopyOp>& ops) { ops.back().tensor = 2; }).message(),
              HasSubstr("no such tensor"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes.front().local = false; }).message(),
              HasSubstr("sent, but both ranks are on one device"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes.back().local = true; }).message(),
              HasSubstr("called local"));
  EXPECT_THAT(AfterOps([](std::vector<CopyOp>& ops) {
                for (CopyOp& op : ops) {  // both halves to one rank
                  op.target = 1;
                  op.local = false;
                }
                std::sort(ops.begin(), ops.end(), [](const CopyOp& a, const CopyOp& b) {
                  return std::tie(a.source, a.tensor, a.box) < std::tie(b.source, b.tensor, b.box);
                });
              }).message(),
              HasSubstr("target 0"));
}

TEST_F(CertificateTest, OpsForARankThatNeedsNothingOfTheTensorAreSeen) {
  target_.holdings.push_back(target_.holdings[0]);
  target_.holdings[1].ranks.pop_back();  // tensor 'b' is no more for target 1
  target_.tensors[1].holding = 1;
  EXPECT_THAT(CheckPlan(source_, target_, topology_, plan_).status().message(),
              HasSubstr("the target asked for no part of the tensor"));
}

TEST_F(CertificateTest, TheSameOpsOfTwoTensorsMayBeRightForOneAlone) {
  // Tensor 'b' of source 1 is where that of source 2 was.
  const JobLayout source = source_;
  source_.holdings.push_back(source_.holdings[0]);
  std::swap(source_.holdings[1].ranks[1].boxes, source_.holdings[1].ranks[2].boxes);
  source_.tensors[1].holding = 1;
  EXPECT_THAT(CheckPlan(source_, target_, topology_, plan_).status().message(),
              HasSubstr("tensor 'b': op from source 1 to target 0, box [2:4, 0:2]: not inside"));
  // Target 1 wants one more column of it.
  target_.holdings.push_back(target_.holdings[0]);
  target_.holdings[1].ranks[1].boxes = {MakeBox({{0, 6}, {1, 4}})};
  target_.tensors[1].holding = 1;
  EXPECT_THAT(CheckPlan(source, target_, topology_, plan_).status().message(),
              HasSubstr("tensor 'b': target 1, box [0:6, 1:4]: element [0, 1] is never written"));
}

TEST_F(CertificateTest, OverlappingOpsAreSeenWhereTheBytesAddUp) {
  // Target 1 gets rows 1-2 twice and row 5 never: as many bytes as it should.
  const Status status = AfterOps([](std::vector<CopyOp>& ops) {
    for (CopyOp& op : ops) {
      if (op.target == 1 && op.source == 1 && op.tensor == 0) op.box[0] = {2, 3};
    }
  });
  EXPECT_THAT(status.message(), HasSubstr("tensor 'a': target 1"));
  EXPECT_THAT(status.message(), HasSubstr("element [3, 2] is never written"));
}

TEST_F(CertificateTest, TablesMustAgreeWithTheOps) {
  EXPECT_THAT(After([](Plan& plan) { ++plan.routes[1].bytes; }).message(), HasSubstr("bytes"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes.pop_back(); }).message(),
              HasSubstr("belong to no route"));
  EXPECT_THAT(
      After([](Plan& plan) { std::swap(plan.routes[1].source, plan.routes[2].source); }).message(),
      HasSubstr("out of order"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes[1].op_count = ~std::uint64_t{0}; }).message(),
              HasSubstr("do not follow"));
  EXPECT_THAT(After([](Plan& plan) {
                for (Route& route : plan.routes) route.round = 0;
              }).message(),
              HasSubstr("is taken"));
  EXPECT_THAT(After([](Plan& plan) { plan.routes[1].round = plan.round_count; }).message(),
              HasSubstr("is taken"));
  EXPECT_THAT(After([](Plan& plan) {
                plan.ops[1].box = static_cast<std::uint32_t>(plan.boxes.size());
              }).message(),
              HasSubstr("no such box"));
  EXPECT_THAT(After([](Plan& plan) { std::swap(plan.boxes[0], plan.boxes[1]); }).message(),
              HasSubstr("out of order or repeated"));
  EXPECT_THAT(After([](Plan& plan) { plan.boxes[0][0].hi = 0; }).message(), HasSubstr("is empty"));
}

TEST_F(CertificateTest, DisagreeingLayoutsAreNoPlan) {
  JobLayout other = source_;
  other.tensors[0].spec.name = "z";
  EXPECT_THAT(CheckPlan(other, target_, topology_, plan_).status().message(),
              HasSubstr("unknown to the source"));
  other = source_;
  other.tensors[0].spec.dtype = DType::kI32;
  EXPECT_THAT(CheckPlan(other, target_, topology_, plan_).status().message(), HasSubstr("differ"));
}

TEST(TilingCheck, AgreesWithCountingElements) {
  // All pairs of boxes inside a 3 x 3 box, and their complement cut in rows.
  std::vector<Box> all;
  for (std::uint64_t a = 0; a < 3; ++a) {
    for (std::uint64_t b = a + 1; b <= 3; ++b) {
      for (std::uint64_t c = 0; c < 3; ++c) {
        for (std::uint64_t d = c + 1; d <= 3; ++d) all.push_back(MakeBox({{a, b}, {c, d}}));
      }
    }
  }
  const Box whole = MakeBox({{0, 3}, {0, 3}});
  TilingCheck check;
  int exact = 0;
  for (const Box& one : all) {
    for (const Box& two : all) {
      for (const Box& three : all) {
        const std::vector<Box> parts = {one, two, three};
        std::array<int, 9> writes = {};
        for (const Box& part : parts) {
          for (std::uint64_t i = part[0].lo; i < part[0].hi; ++i) {
            for (std::uint64_t j = part[1].lo; j < part[1].hi; ++j) ++writes[i * 3 + j];
          }
        }
        const auto wrong = std::find_if(writes.begin(), writes.end(), [](int n) { return n != 1; });
        ASSERT_EQ(check.Exact(whole, parts), wrong == writes.end());
        exact += wrong == writes.end() ? 1 : 0;
        if (wrong == writes.end()) continue;
        const TilingFault fault = FirstTilingFault(whole, parts);
        ASSERT_EQ(fault.at[0] * 3 + fault.at[1],
                  static_cast<std::uint64_t>(wrong - writes.begin()));
        ASSERT_EQ(fault.twice, *wrong > 1);
      }
    }
  }
  EXPECT_GT(exact, 0);
}

TEST(CheckBuffers, EveryBoxNeedsItsPlaceAndNothingElse) {
  const std::vector<TensorSpec> specs = {{"a", DType::kF32, MakeShape({4})}};
  RankLayout layout;
  layout.tensors = {{specs[0], {MakeBox({{0, 2}}), MakeBox({{2, 4}})}}};
  Registration registration;
  registration.tensors = specs;
  registration.segment_bytes = {16};
  registration.pieces = {{0, 0, MakeBox({{0, 2}}), 0, {4}}, {0, 0, MakeBox({{2, 4}}), 8, {4}}};
  EXPECT_OK(CheckBuffers(layout, registration, 0, true));

  Registration bad = registration;
  bad.pieces.pop_back();
  EXPECT_THAT(CheckBuffers(layout, bad, 0, true).message(), HasSubstr("box [2:4] is in no buffer"));
  bad = registration;
  bad.pieces[1].offset = 4;
  EXPECT_THAT(CheckBuffers(layout, bad, 0, true),
              IsStatus(Code::kInvalidArgument, Reason::kOverlap));
  EXPECT_OK(CheckBuffers(layout, bad, 0, false));
  bad = registration;
  bad.pieces[1].offset = 12;
  EXPECT_THAT(CheckBuffers(layout, bad, 0, false),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  bad = registration;
  bad.tensors[0].name = "b";
  EXPECT_THAT(CheckBuffers(layout, bad, 0, true),
              IsStatus(Code::kInvalidArgument, Reason::kUnknownTensor));
  bad = registration;
  bad.tensors[0].dtype = DType::kI32;
  EXPECT_THAT(CheckBuffers(layout, bad, 0, true),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  RankLayout smaller = layout;
  smaller.tensors[0].boxes.pop_back();
  EXPECT_THAT(CheckBuffers(smaller, registration, 0, true).message(),
              HasSubstr("which the layout has not"));
}

}  // namespace
}  // namespace tensorbus::planner
