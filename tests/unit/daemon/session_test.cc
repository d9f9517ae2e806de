#include "tensorbus/daemon/session.h"

#include <gtest/gtest.h>

#include "tensorbus/rpc/convert.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::daemon {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

Box BoxOf(std::uint64_t lo, std::uint64_t hi) {
  const Range ranges[] = {{.lo = lo, .hi = hi}};
  return Box(std::span<const Range>(ranges));
}

JobLayout::Tensor BytesTensor(const char* name, std::uint64_t bytes, std::uint32_t holding) {
  const std::uint64_t dims[] = {bytes};
  return {.spec = {.name = name, .dtype = DType::kU8, .shape = Shape::Create(dims).value()},
          .holding = holding};
}

/// Two ranks that hold these parts of "w" (160 bytes) and of "b" (40 bytes).
std::shared_ptr<const LayoutEntry> Entry(Holding w, Holding b) {
  JobLayout layout;
  layout.rank_count = 2;
  layout.tensors = {BytesTensor("w", 160, 0), BytesTensor("b", 40, 1)};
  layout.holdings = {std::move(w), std::move(b)};
  auto entry = std::make_shared<LayoutEntry>(std::move(layout));
  entry->rank_bytes = {100, 100};
  entry->rank_boxes = BoxSumsOf(entry->layout);
  return entry;
}

/// A half of each for each rank.
std::shared_ptr<const LayoutEntry> TargetEntry() {
  return Entry(Holding{{{0, {BoxOf(0, 80)}}, {1, {BoxOf(80, 160)}}}},
               Holding{{{0, {BoxOf(0, 20)}}, {1, {BoxOf(20, 40)}}}});
}

/// The first and the second half of each of those.
std::shared_ptr<const LayoutEntry> SourceEntry() {
  return Entry(
      Holding{{{0, {BoxOf(0, 40), BoxOf(80, 120)}}, {1, {BoxOf(40, 80), BoxOf(120, 160)}}}},
      Holding{{{0, {BoxOf(0, 10), BoxOf(20, 30)}}, {1, {BoxOf(10, 20), BoxOf(30, 40)}}}});
}

/// What source s gives to target t: a half of what t holds.
BoxSum RouteBoxes(std::uint64_t source, std::uint64_t target) {
  BoxSum boxes;
  boxes.Add(0, BoxOf(80 * target + 40 * source, 80 * target + 40 * source + 40));
  boxes.Add(1, BoxOf(20 * target + 10 * source, 20 * target + 10 * source + 10));
  return boxes;
}

/// Two sources at agent a, two targets at agent b; every target gets 50 bytes from each source.
Session::Config Config(Proof proof = Proof::kReadback) {
  Session::Config config;
  config.id = SessionId{9};
  config.channel = "policy";
  config.epoch = ChannelEpoch{3};
  config.version = Version{7};
  config.source_job = "trainer";
  config.target_job = "engine";
  config.source = SourceEntry();
  config.target = TargetEntry();
  config.proof = proof;
  config.participants = {
      {.agent = "a", .host = "h", .endpoints = {}, .source_ranks = {0, 1}, .target_ranks = {}},
      {.agent = "b", .host = "h", .endpoints = {}, .source_ranks = {}, .target_ranks = {0, 1}}};
  return config;
}

proto::SessionReceipt Receipt(std::uint32_t target) {
  proto::SessionReceipt receipt;
  receipt.set_target_rank(target);
  receipt.set_version(7);
  receipt.set_channel_epoch(3);
  for (std::uint32_t source = 0; source < 2; ++source) {
    proto::RouteReceipt& route = *receipt.add_routes();
    route.set_source_rank(source);
    route.set_target_rank(target);
    *route.mutable_source() = rpc::ToProto(DigestSum{.a = source + 1, .b = target, .bytes = 50});
    *route.mutable_target() = route.source();
    *route.mutable_boxes() = rpc::ToProto(RouteBoxes(source, target));
  }
  return receipt;
}

proto::SourceDone Done(std::uint32_t source) {
  proto::SourceDone done;
  done.set_source_rank(source);
  done.set_version(7);
  done.set_channel_epoch(3);
  for (std::uint32_t target = 0; target < 2; ++target) {
    proto::RouteReceipt& route = *done.add_routes();
    route.set_source_rank(source);
    route.set_target_rank(target);
    *route.mutable_boxes() = rpc::ToProto(RouteBoxes(source, target));
  }
  return done;
}

const Hash128 kPlan = HashOf(std::string_view("plan"));

class SessionTest : public ::testing::Test {
 protected:
  void Ready() {
    ASSERT_OK(session_.OnReady("a", kPlan));
    const auto step = session_.OnReady("b", kPlan);
    ASSERT_OK(step);
    ASSERT_EQ(*step, Session::Step::kGo);
  }
  void Received() {
    Ready();
    ASSERT_OK(session_.OnReceipt("b", Receipt(0)));
    ASSERT_OK(session_.OnReceipt("b", Receipt(1)));
  }

  Session session_{Config()};
};

TEST_F(SessionTest, GoesItsWayFromReadyToEnd) {
  Ready();
  EXPECT_EQ(*session_.OnReceipt("b", Receipt(0)), Session::Step::kNone);
  EXPECT_EQ(*session_.OnReceipt("b", Receipt(1)), Session::Step::kFinish);
  EXPECT_EQ(*session_.OnSourceDone("a", Done(0)), Session::Step::kNone);
  EXPECT_EQ(*session_.OnSourceDone("a", Done(1)), Session::Step::kFlipPrepare);
  EXPECT_EQ(*session_.OnFlipReady("b", 0), Session::Step::kNone);
  EXPECT_EQ(*session_.OnFlipReady("b", 1), Session::Step::kFlipCommit);
  EXPECT_EQ(*session_.OnFlipDone("b", 0), Session::Step::kNone);
  EXPECT_EQ(*session_.OnFlipDone("b", 1), Session::Step::kEnd);
  EXPECT_EQ(session_.bytes(), 200U);
}

TEST_F(SessionTest, RefusesAReceiptThatLeavesARouteOut) {
  Ready();
  proto::SessionReceipt receipt = Receipt(0);
  receipt.mutable_routes()->RemoveLast();
  const auto step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(step.status().message(), HasSubstr("some route is missing"));
}

TEST_F(SessionTest, RefusesReportsOfRanksThatAreNotTheAgents) {
  Ready();
  EXPECT_THAT(session_.OnReceipt("a", Receipt(0)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(session_.OnReady("stranger", kPlan),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(SessionTest, RefusesReportsThatComeTwiceOrTooEarly) {
  EXPECT_THAT(session_.OnReceipt("b", Receipt(0)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  Ready();
  ASSERT_OK(session_.OnReceipt("b", Receipt(0)));
  const auto twice = session_.OnReceipt("b", Receipt(0));
  EXPECT_THAT(twice, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(twice.status().message(), HasSubstr("reported its receipt twice"));
  EXPECT_THAT(session_.OnFlipReady("b", 0), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(SessionTest, RefusesAReceiptWhoseRoutesAreNotItsOwnOrNoneOrNamedTwice) {
  Ready();
  proto::SessionReceipt receipt = Receipt(0);
  receipt.mutable_routes(0)->set_target_rank(1);
  auto step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(step.status().message(), HasSubstr("target rank 1"));
  receipt = Receipt(0);
  receipt.mutable_routes(0)->set_source_rank(2);
  step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(step.status().message(), HasSubstr("source rank 2 of 2"));
  receipt = Receipt(1);
  receipt.mutable_routes(1)->set_source_rank(0);  // bytes and boxes of all routes are still right
  step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/trainer rank 0 of 2 twice"));
}

TEST_F(SessionTest, RefusesWhatComesBeforeItsTurn) {
  Ready();
  for (const auto& step : {session_.OnSourceDone("a", Done(0)), session_.OnFlipReady("b", 0),
                           session_.OnFlipDone("b", 0)}) {
    EXPECT_THAT(step, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  }
  ASSERT_OK(session_.OnReceipt("b", Receipt(0)));
  ASSERT_OK(session_.OnReceipt("b", Receipt(1)));
  EXPECT_EQ(*session_.OnSourceDone("a", Done(0)), Session::Step::kNone);
  EXPECT_EQ(*session_.OnSourceDone("a", Done(1)), Session::Step::kFlipPrepare);
  EXPECT_THAT(session_.OnFlipDone("b", 0), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(SessionTest, RefusesASourceThatCountedAnotherNumberOfBytes) {
  Received();
  proto::SourceDone done = Done(0);
  *done.mutable_routes(0)->mutable_source() = Receipt(0).routes(0).source();
  done.mutable_routes(0)->mutable_source()->set_bytes(49);
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST_F(SessionTest, RefusesReceiptsOfAnotherVersionOrEpoch) {
  Ready();
  proto::SessionReceipt receipt = Receipt(1);
  receipt.set_version(6);
  auto step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/engine replica 0 rank 1 of 2"));
  EXPECT_THAT(step.status().message(), HasSubstr("version 6"));
  receipt = Receipt(1);
  receipt.set_channel_epoch(2);
  step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(step.status().message(), HasSubstr("epoch 2"));
}

TEST_F(SessionTest, RefusesASourceWhoseMemoryHoldsAnotherVersionOrEpoch) {
  Received();
  proto::SourceDone done = Done(1);
  done.set_version(8);
  const auto step = session_.OnSourceDone("a", done);
  EXPECT_THAT(step, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/trainer rank 1 of 2"));
  done = Done(1);
  done.set_channel_epoch(4);
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(SessionTest, RefusesAReceiptForAnotherBoxNamingRankAndTensor) {
  Ready();
  proto::SessionReceipt receipt = Receipt(0);
  BoxSum boxes = RouteBoxes(1, 0);
  boxes.Add(1, BoxOf(10, 20));  // "b" once more than the layout has it
  *receipt.mutable_routes(1)->mutable_boxes() = rpc::ToProto(boxes);
  const auto step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/engine replica 0 rank 0 of 2"));
  EXPECT_THAT(step.status().message(), HasSubstr("boxes of b "));
}

TEST_F(SessionTest, RefusesTheReceiptsOfAnotherRank) {
  Ready();
  proto::SessionReceipt receipt = Receipt(0);
  for (std::uint32_t source = 0; source < 2; ++source) {
    *receipt.mutable_routes(static_cast<int>(source))->mutable_boxes() =
        rpc::ToProto(RouteBoxes(source, 1));
  }
  const auto step = session_.OnReceipt("b", receipt);
  EXPECT_THAT(step, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(step.status().message(), HasSubstr("several tensors"));
}

TEST_F(SessionTest, RefusesASourceThatOpenedAnotherBox) {
  Received();
  proto::SourceDone done = Done(1);
  BoxSum boxes;
  boxes.Add(0, BoxOf(40, 79));
  boxes.Add(1, BoxOf(10, 20));
  *done.mutable_routes(0)->mutable_boxes() = rpc::ToProto(boxes);
  const auto step = session_.OnSourceDone("a", done);
  EXPECT_THAT(step, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/trainer rank 1 of 2"));
  EXPECT_THAT(step.status().message(), HasSubstr("boxes of w "));
}

TEST_F(SessionTest, RefusesASourceThatLeavesARouteOfItsOwnOut) {
  Received();
  proto::SourceDone done = Done(1);
  done.mutable_routes()->RemoveLast();
  const auto step = session_.OnSourceDone("a", done);
  EXPECT_THAT(step, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/trainer rank 1 of 2 leaves out"));
  EXPECT_THAT(step.status().message(), HasSubstr("policy/engine replica 0 rank 1 of 2"));
}

TEST_F(SessionTest, RefusesASourceThatNamesARouteThatIsNotItsOwnOrTwice) {
  Received();
  proto::SourceDone done = Done(1);
  *done.add_routes() = Done(0).routes(0);
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  done = Done(1);
  *done.add_routes() = done.routes(0);
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  done = Done(1);
  *done.add_routes() = done.routes(0);
  done.mutable_routes(2)->set_target_rank(5);  // besides all of its own
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST(SessionProof, StreamAsksEverySourceForReceiptsOfItsOwn) {
  for (const bool counted : {false, true}) {
    Session session(Config(Proof::kStream));
    ASSERT_OK(session.OnReady("a", kPlan));
    ASSERT_OK(session.OnReady("b", kPlan));
    ASSERT_OK(session.OnReceipt("b", Receipt(0)));
    ASSERT_OK(session.OnReceipt("b", Receipt(1)));
    proto::SourceDone done = Done(0);
    for (int target = 0; counted && target < 2; ++target) {
      *done.mutable_routes(target)->mutable_source() =
          Receipt(static_cast<std::uint32_t>(target)).routes(0).source();
    }
    const auto step = session.OnSourceDone("a", done);
    EXPECT_EQ(step.ok(), counted) << step.status();
  }
}

/// What becomes of the end of source 1 when these tensors' parts of its route to target 0 changed
/// between its count and the transfer.
Result<Session::Step> AfterAStrayWrite(const std::vector<std::uint32_t>& tensors) {
  Session session(Config(Proof::kStream));
  for (const char* agent : {"a", "b"}) {
    if (const auto ready = session.OnReady(agent, kPlan); !ready.ok()) return ready;
  }
  for (std::uint32_t target = 0; target < 2; ++target) {
    if (const auto got = session.OnReceipt("b", Receipt(target)); !got.ok()) return got;
  }
  proto::SourceDone done = Done(1);
  for (std::uint32_t target = 0; target < 2; ++target) {
    *done.mutable_routes(static_cast<int>(target))->mutable_source() =
        Receipt(target).routes(1).source();
  }
  proto::RouteReceipt& route = *done.mutable_routes(0);
  for (const std::uint32_t tensor : tensors) {
    const std::uint64_t change = 77 << tensor;
    route.mutable_source()->set_a(route.source().a() + change);
    route.set_located(route.located() + (tensor + 1) * change);
  }
  return session.OnSourceDone("a", done);
}

TEST(StrayWrite, IsNamedWithRanksTensorAndBox) {
  EXPECT_OK(AfterAStrayWrite({}));
  const auto one = AfterAStrayWrite({1});
  EXPECT_THAT(one, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  EXPECT_THAT(one.status().message(), HasSubstr("policy/trainer rank 1 of 2"));
  EXPECT_THAT(one.status().message(), HasSubstr("policy/engine replica 0 rank 0 of 2"));
  EXPECT_THAT(one.status().message(), HasSubstr("(b[10:20])"));
  const auto two = AfterAStrayWrite({0, 1});
  EXPECT_THAT(two, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  EXPECT_THAT(two.status().message(), HasSubstr("(several tensors)"));
}

TEST_F(SessionTest, AllowsTargetsThatWereNotReadBackForWeakerProofsOnly) {
  for (const Proof proof : {Proof::kStream, Proof::kReadback}) {
    Session session(Config(proof));
    ASSERT_OK(session.OnReady("a", kPlan));
    ASSERT_OK(session.OnReady("b", kPlan));
    proto::SessionReceipt receipt = Receipt(0);
    for (auto& route : *receipt.mutable_routes()) {
      route.mutable_target()->set_a(0);
      route.mutable_target()->set_b(0);
    }
    EXPECT_EQ(session.OnReceipt("b", receipt).ok(), proof == Proof::kStream);
  }
}

TEST(KnownSession, StartsMovingAndStillChecksThePlan) {
  Session::Config config = Config();
  config.plan_digest = kPlan;
  Session session(config);
  EXPECT_EQ(session.state(), Session::State::kMoving);
  EXPECT_TRUE(session.PrepareMessage(std::chrono::seconds(1)).go());
  EXPECT_OK(session.OnReady("a", kPlan));
  EXPECT_THAT(session.OnReady("b", HashOf(std::string_view("other"))),
              IsStatus(Code::kAborted, Reason::kPlanMismatch));
}

}  // namespace
}  // namespace tensorbus::daemon
