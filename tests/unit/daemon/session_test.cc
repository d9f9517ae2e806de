#include "tensorbus/daemon/session.h"

#include <gtest/gtest.h>

#include "tensorbus/rpc/convert.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::daemon {
namespace {

using ::testing::HasSubstr;
using testing::IsStatus;

std::shared_ptr<const LayoutEntry> Entry(std::uint32_t rank_count, std::uint64_t rank_bytes) {
  JobLayout layout;
  layout.rank_count = rank_count;
  auto entry = std::make_shared<LayoutEntry>(std::move(layout));
  entry->rank_bytes.assign(rank_count, rank_bytes);
  return entry;
}

/// Two sources at agent a, two targets at agent b; every target gets 50 bytes from each source.
Session::Config Config(Proof proof = Proof::kReadback) {
  Session::Config config;
  config.id = SessionId{9};
  config.channel = "policy";
  config.source_job = "trainer";
  config.target_job = "engine";
  config.source = Entry(2, 100);
  config.target = Entry(2, 100);
  config.proof = proof;
  config.participants = {
      {.agent = "a", .host = "h", .endpoints = {}, .source_ranks = {0, 1}, .target_ranks = {}},
      {.agent = "b", .host = "h", .endpoints = {}, .source_ranks = {}, .target_ranks = {0, 1}}};
  return config;
}

proto::SessionReceipt Receipt(std::uint32_t target) {
  proto::SessionReceipt receipt;
  receipt.set_target_rank(target);
  for (std::uint32_t source = 0; source < 2; ++source) {
    proto::RouteReceipt& route = *receipt.add_routes();
    route.set_source_rank(source);
    route.set_target_rank(target);
    *route.mutable_source() = rpc::ToProto(DigestSum{.a = source + 1, .b = target, .bytes = 50});
    *route.mutable_target() = route.source();
  }
  return receipt;
}

proto::SourceDone Done(std::uint32_t source) {
  proto::SourceDone done;
  done.set_source_rank(source);
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
  EXPECT_THAT(session_.OnReceipt("b", Receipt(0)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(session_.OnFlipReady("b", 0), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(SessionTest, RefusesASourceThatCountedOtherBytes) {
  Ready();
  ASSERT_OK(session_.OnReceipt("b", Receipt(0)));
  ASSERT_OK(session_.OnReceipt("b", Receipt(1)));
  proto::SourceDone done = Done(0);
  *done.add_routes() = Receipt(0).routes(0);
  done.mutable_routes(0)->mutable_source()->set_a(77);
  EXPECT_THAT(session_.OnSourceDone("a", done),
              IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
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
