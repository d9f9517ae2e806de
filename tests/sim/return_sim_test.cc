#include <gtest/gtest.h>
#include <limits>

#include "tensorbus/rpc/convert.h"
#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

// What was published before the daemon, or a producer's agent, was lost, and what becomes of it
// when the ranks come back with what they still hold.
namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using daemon::SlowConsumer;
using ::testing::HasSubstr;
using testing::IsStatus;

/// Two trainer ranks at agents of their own, engines at a third.
class ReturnSim : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"a", "b", "e"}) world_.AddAgent(name);
    world_.StartJob("trainer", Role::kProducer, 2, {"a", "b"}, {});
    world_.StartJob("engine", Role::kConsumer, 2, {"e"}, {});
  }
  Worker& Trainer(std::uint32_t rank) { return world_.worker("trainer", rank); }
  Worker& Engine(std::uint32_t rank = 0, std::uint32_t replica = 0) {
    return world_.worker("engine", rank, replica);
  }
  Outcome Released(std::uint32_t rank, std::uint64_t version) {
    return Trainer(rank).released[version];
  }
  void ReleaseAll(std::uint64_t version, Nanos timeout = 60s) {
    for (const std::uint32_t rank : {0U, 1U}) world_.Release(Trainer(rank), version, timeout);
  }
  void Sync(Selector selector = Selector::kLatest, std::uint64_t version = 0) {
    world_.UpdateAll("engine", selector, 10s, version);
    world_.executor.Advance(1s);
  }
  /// A trainer rank as it registers again.
  Status Back(std::uint32_t rank, std::uint64_t published, std::vector<World::Held> held,
              const World::JobOptions& more = {}, const std::string& agent = "") {
    World::JobOptions back = more;
    if (back.known_epoch == 0) back.known_epoch = 1;
    back.live_version = published;
    back.held = std::move(held);
    const std::string at = agent.empty() ? (rank == 0 ? "a" : "b") : agent;
    return world_.Register(at, "trainer", Role::kProducer, rank, 2, back).registered.value();
  }
  void EngineBack(std::uint64_t live, std::uint32_t replica = 0) {
    World::JobOptions back;
    back.known_epoch = 1;
    back.live_version = live;
    back.replica = replica;
    world_.StartJob("engine", Role::kConsumer, 2, {"e"}, back);
  }
  std::vector<std::string> Missing() {
    std::vector<std::string> who;
    world_.core->WhoIsMissing({}, [&](Result<proto::WhoIsMissingReply> reply) {
      for (const auto& missing : reply->missing()) who.push_back(missing.who());
    });
    return who;
  }
  void RestartDaemon() { world_.RestartDaemon(100); }
  /// Beyond the time in which engines may still be on their way to a daemon that restarted.
  void Settle() { world_.executor.Advance(11s); }

  World world_;
};

constexpr World::Held Snapshot(std::uint64_t version, std::uint32_t keep_last) {
  return {.version = version,
          .policy = SlowConsumer::kSnapshot,
          .min_replicas = 1,
          .keep_last = keep_last};
}

// ---- the daemon restarts

TEST_F(ReturnSim, AVersionThatNobodyBroughtOutlivesTheDaemon) {
  world_.PublishAll("trainer", 1);
  Sync();
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  ReleaseAll(2);
  Settle();
  EXPECT_FALSE(Released(0, 2)) << "nobody has brought it";
  EngineBack(1);
  world_.executor.Advance(1s);
  EXPECT_FALSE(Released(0, 2)) << "the engine serves version 1";
  Sync();
  EXPECT_OK(Engine().updated.value());
  EXPECT_EQ(Engine().live, 2U);
  EXPECT_OK(Released(0, 2).value());
  EXPECT_OK(Released(1, 2).value());
  world_.PublishAll("trainer", 3);
  Sync(Selector::kNext);
  EXPECT_EQ(Engine().live, 3U);
}

TEST_F(ReturnSim, WhatEnginesHaveBroughtIsReleasedAgain) {
  world_.PublishAll("trainer", 2);
  Sync();
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  EngineBack(2);
  ReleaseAll(2);
  Settle();
  EXPECT_OK(Released(0, 2).value());
}

TEST_F(ReturnSim, OneRankAloneMakesNoVersionReadableAndIsToldWhoIsMissing) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  EngineBack(1);
  world_.Release(Trainer(0), 2, 20s);
  world_.UpdateAll("engine", Selector::kLatest, 20s);
  EXPECT_THAT(Missing(), ::testing::Contains(HasSubstr(
                             "policy/trainer rank 1 of 2 has not come back with version 2")));
  world_.executor.Advance(21s);
  EXPECT_THAT(Released(0, 2).value(), IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(Released(0, 2)->message(), HasSubstr("rank 1 of 2 has not come back with version 2"));
  EXPECT_THAT(Engine().updated.value(), IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(Engine().updated->message(), HasSubstr("policy/trainer rank 1 of 2"));
  // It comes late, and all goes on.
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  Sync();
  EXPECT_EQ(Engine().live, 2U);
}

TEST_F(ReturnSim, NobodyWaitsForWhatARankHoldsNoMore) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  world_.Release(Trainer(0), 2, 60s);
  Settle();
  EXPECT_FALSE(Released(0, 2));
  ASSERT_OK(Back(1, 2, {}));  // it wrote on
  EXPECT_OK(Released(0, 2).value());
  EngineBack(1);
  Sync();
  EXPECT_EQ(Engine().live, 1U) << "one part of version 2 is gone";
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
  world_.PublishAll("trainer", 3);
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine().live, 3U);
}

TEST_F(ReturnSim, TheSameWhenTheRankWithoutItComesFirst) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(1, 2, {}));
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  world_.Release(Trainer(0), 2, 60s);
  EXPECT_OK(Released(0, 2).value());
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
}

TEST_F(ReturnSim, ARankThatIsAVersionBehindPublishesTheOtherAsUsual) {
  world_.PublishAll("trainer", 1);
  world_.Publish(Trainer(0), 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 1, {{.version = 1}}));
  world_.Release(Trainer(1), 1, 60s);
  EXPECT_OK(Released(1, 1).value()) << "rank 0 holds that no more";
  world_.Publish(Trainer(1), 2);
  EXPECT_OK(Trainer(1).published.value());
  EngineBack(0);
  Sync();
  EXPECT_EQ(Engine().live, 2U);
}

TEST_F(ReturnSim, SnapshotsCanBeRolledBackToAndTooManyAreDropped) {
  for (std::uint64_t version = 1; version <= 4; ++version) {
    world_.PublishAll("trainer", version, SlowConsumer::kSnapshot, 1, 2);
  }
  RestartDaemon();
  // Rank 0 was not told in time to drop 1 and 2, both were not told of 2.
  ASSERT_OK(Back(0, 4, {Snapshot(1, 2), Snapshot(2, 2), Snapshot(3, 2), Snapshot(4, 2)}));
  ASSERT_OK(Back(1, 4, {Snapshot(2, 2), Snapshot(3, 2), Snapshot(4, 2)}));
  world_.executor.RunReady();
  EXPECT_EQ(Trainer(0).snapshots, (std::set<std::uint64_t>{3, 4}));
  EXPECT_EQ(Trainer(1).snapshots, (std::set<std::uint64_t>{3, 4}));
  EngineBack(0);
  Sync();
  EXPECT_EQ(Engine().live, 4U);
  proto::RollbackRequest request;
  request.set_version(3);
  Result<proto::RollbackReply> reply = Status(Code::kUnknown, "");
  world_.core->Rollback(request, [&](Result<proto::RollbackReply> got) { reply = std::move(got); });
  ASSERT_OK(reply);
  Sync();
  EXPECT_EQ(Engine().live, 3U);
  world_.PublishAll("trainer", 5, SlowConsumer::kSnapshot, 1, 2);
  world_.executor.RunReady();
  EXPECT_EQ(Trainer(0).snapshots, (std::set<std::uint64_t>{4, 5}));
}

TEST_F(ReturnSim, ASkippedVersionIsReleasedAtOnceAndServedUntilThen) {
  world_.PublishAll("trainer", 2, SlowConsumer::kSkip);
  RestartDaemon();
  const World::Held held = {.version = 2, .policy = SlowConsumer::kSkip};
  ASSERT_OK(Back(0, 2, {held}));
  ASSERT_OK(Back(1, 2, {held}));
  EngineBack(1);
  Sync();
  EXPECT_EQ(Engine().live, 2U);
  ReleaseAll(2);
  EXPECT_OK(Released(0, 2).value());
}

TEST_F(ReturnSim, AReplicaThatComesBackLaterThanTheOthersIsWaitedFor) {
  World::JobOptions second;
  second.replica = 1;
  world_.StartJob("engine", Role::kConsumer, 2, {"e"}, second);
  world_.PublishAll("trainer", 1);
  RestartDaemon();
  ASSERT_OK(Back(0, 1, {{.version = 1}}));
  ASSERT_OK(Back(1, 1, {{.version = 1}}));
  EngineBack(1, 0);
  ReleaseAll(1);
  world_.executor.Advance(3s);
  EXPECT_FALSE(Released(0, 1)) << "the second replica is still on its way";
  EngineBack(0, 1);
  Settle();
  EXPECT_FALSE(Released(0, 1)) << "it has not brought it";
  world_.UpdateAll("engine", Selector::kLatest, 10s, 0, 1);
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine(0, 1).live, 1U);
  EXPECT_OK(Released(0, 1).value());
}

TEST_F(ReturnSim, AReplicaThatNeverComesBackIsNotWaitedForForEver) {
  world_.PublishAll("trainer", 1);
  RestartDaemon();
  ASSERT_OK(Back(0, 1, {{.version = 1}}));
  ASSERT_OK(Back(1, 1, {{.version = 1}}));
  EngineBack(1);
  world_.Release(Trainer(0), 1, 2s);
  world_.Release(Trainer(1), 1, 60s);
  world_.executor.Advance(3s);
  EXPECT_THAT(Released(0, 1).value(), IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(Released(0, 1)->message(), HasSubstr("before this daemon started"));
  world_.executor.Advance(6s);
  EXPECT_FALSE(Released(1, 1));
  world_.executor.Advance(2s);
  EXPECT_OK(Released(1, 1).value());
}

TEST_F(ReturnSim, APublishThatWasNotAnsweredMayBeMadeAgain) {
  world_.PublishAll("trainer", 3);  // whose answers are lost with the daemon
  Sync();
  RestartDaemon();
  EngineBack(3);
  World::JobOptions unsure;
  unsure.publishing = 3;
  ASSERT_OK(Back(0, 2, {}, unsure));
  ASSERT_OK(Back(1, 2, {}, unsure));
  world_.PublishAll("trainer", 3);
  world_.Publish(Trainer(0), 3);
  EXPECT_THAT(Trainer(0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  ReleaseAll(3);
  Settle();
  EXPECT_OK(Released(0, 3).value());
}

TEST_F(ReturnSim, APublishOfWhichOneRankHeardTheAnswerIsCompletedByTheOther) {
  world_.PublishAll("trainer", 2);
  world_.PublishAll("trainer", 3);
  RestartDaemon();
  ASSERT_OK(Back(0, 3, {{.version = 3}}));
  World::JobOptions unsure;
  unsure.publishing = 3;
  ASSERT_OK(Back(1, 2, {}, unsure));
  EngineBack(0);
  Sync();
  EXPECT_EQ(Engine().live, 0U);
  world_.Publish(Trainer(1), 3);
  EXPECT_OK(Trainer(1).published.value());
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine().live, 3U);
}

TEST_F(ReturnSim, ADirtyReplicaIsRepairedWithTheVersionThatOutlivedTheDaemon) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  World::JobOptions dirty;
  dirty.known_epoch = 1;
  dirty.live_version = 2;
  dirty.dirty = true;
  world_.StartJob("engine", Role::kConsumer, 2, {"e"}, dirty);
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  Sync();
  EXPECT_OK(Engine().updated.value());
}

// ---- what must not become readable

TEST_F(ReturnSim, PartsThatWerePublishedUnlikeMakeNoVersion) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 2, {Snapshot(2, 1)}));
  world_.executor.RunReady();
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
  EXPECT_TRUE(Trainer(1).snapshots.empty());
  world_.Release(Trainer(0), 2, 60s);
  EXPECT_OK(Released(0, 2).value());
}

TEST_F(ReturnSim, ARankHoldsNothingThatItNeverPublishedNorVersionsWithoutNumber) {
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {Snapshot(0, 1), Snapshot(3, 1), Snapshot(2, daemon::kMaxKeptVersions)}));
  ASSERT_OK(Back(1, 2, {Snapshot(0, 1), Snapshot(3, 1), Snapshot(2, daemon::kMaxKeptVersions)}));
  world_.executor.RunReady();
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
  EXPECT_TRUE(Trainer(0).snapshots.empty()) << "nobody will ask for them";
}

TEST_F(ReturnSim, RefusesMoreVersionsThanAChannelKeeps) {
  RestartDaemon();
  std::vector<World::Held> many(daemon::kMaxKeptVersions + 1, Snapshot(2, 1));
  EXPECT_THAT(Back(0, 2, many), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(ReturnSim, RefusesNumbersThatLeaveNoRoomForAnother) {
  constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
  RestartDaemon();
  EXPECT_THAT(Back(0, kLast, {}), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  World::JobOptions unsure;
  unsure.publishing = kLast;
  EXPECT_THAT(Back(0, 1, {}, unsure), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  World::JobOptions engine;
  engine.known_epoch = 1;
  engine.live_version = kLast;
  EXPECT_THAT(world_.Register("e", "engine", Role::kConsumer, 0, 2, engine).registered.value(),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  // The greatest that may be leaves the channel usable.
  ASSERT_OK(Back(0, kLast - 2, {}));
  ASSERT_OK(Back(1, kLast - 2, {}));
  world_.PublishAll("trainer", kLast - 1);
  EXPECT_OK(Trainer(0).published.value());
}

TEST_F(ReturnSim, ANewProcessAmongRanksThatCameBackEndsTheirEpochAndTheirVersions) {
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 1);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {Snapshot(2, 1)}));
  World::JobOptions fresh;
  fresh.pid = 2000;
  ASSERT_OK(world_.Register("b", "trainer", Role::kProducer, 1, 2, fresh).registered.value());
  world_.executor.RunReady();
  EXPECT_EQ(Trainer(1).epoch, 2U);
  EXPECT_TRUE(Trainer(0).snapshots.empty());
  world_.Publish(Trainer(1), 2);
  EXPECT_FALSE(Trainer(1).published->ok()) << "another run's version 2";
  world_.Publish(Trainer(0), 3);
  EXPECT_THAT(Trainer(0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(ReturnSim, ARankOfAnEpochThatIsOverBringsNothingBack) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  World::JobOptions fresh;
  fresh.pid = 2000;
  fresh.seen_epoch = 1;
  ASSERT_OK(world_.Register("a", "trainer", Role::kProducer, 0, 2, fresh).registered.value());
  EXPECT_THAT(Back(1, 2, {{.version = 2}}),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
}

TEST_F(ReturnSim, WhatSomebodyNewClaimsToHoldDoesNotCount) {
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 1);
  for (const std::uint32_t rank : {0U, 1U}) world_.Leave(Trainer(rank));
  World::JobOptions fresh;
  fresh.pid = 2000;
  fresh.live_version = 2;
  fresh.held = {Snapshot(2, 1)};
  world_.StartJob("trainer", Role::kProducer, 2, {"a", "b"}, fresh);
  world_.executor.RunReady();
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
  EXPECT_TRUE(Trainer(0).snapshots.empty());
}

TEST_F(ReturnSim, ARankThatComesBackWithAnotherLayoutBringsNoVersion) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  World::JobOptions other;
  other.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  EXPECT_FALSE(Back(1, 2, {{.version = 2}}, other).ok());
  EngineBack(1);
  Sync();
  EXPECT_EQ(Engine().live, 1U);
  EXPECT_THAT(Missing(), ::testing::Contains(HasSubstr("policy/trainer rank 1 of 2")));
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine().live, 2U);
}

TEST_F(ReturnSim, ARankThatWasRefusedHoldsNothing) {
  world_.PublishAll("trainer", 2);
  RestartDaemon();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  World::JobOptions other;
  other.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  ASSERT_FALSE(Back(1, 2, {{.version = 2}}, other).ok());
  ASSERT_OK(Back(1, 2, {}));
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
}

// ---- a producer's agent is lost

TEST_F(ReturnSim, AVersionOutlivesTheAgentOfOneOfItsRanks) {
  world_.PublishAll("trainer", 1);
  Sync();
  world_.PublishAll("trainer", 2);
  ReleaseAll(2);
  world_.agent("a").Die();
  world_.executor.Advance(20s);
  EXPECT_FALSE(Released(1, 2)) << "nobody has brought it, and rank 0 may come back";
  world_.UpdateAll("engine", Selector::kLatest, 60s);
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine().live, 1U);
  EXPECT_THAT(Missing(), ::testing::Contains(HasSubstr(
                             "policy/trainer rank 0 of 2 has not come back with version 2")));
  world_.AddAgent("c");
  ASSERT_OK(Back(0, 2, {{.version = 2}}, {}, "c"));
  world_.executor.Advance(1s);
  EXPECT_EQ(Engine().live, 2U);
  EXPECT_OK(Released(1, 2).value());
  EXPECT_EQ(Trainer(0).epoch, 1U);
}

TEST_F(ReturnSim, NobodyWaitsForAVersionWhoseRankComesBackWithoutIt) {
  world_.PublishAll("trainer", 2);
  ReleaseAll(2);
  world_.agent("a").Die();
  world_.executor.Advance(1s);
  EXPECT_FALSE(Released(1, 2));
  world_.agent("a").Attach();
  ASSERT_OK(Back(0, 2, {}));
  EXPECT_OK(Released(1, 2).value());
}

TEST_F(ReturnSim, SnapshotsThatWentWithAnAgentAreDroppedAtTheOthers) {
  world_.PublishAll("trainer", 1, SlowConsumer::kSnapshot, 1, 2);
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 2);
  world_.agent("a").Die();
  world_.executor.Advance(1s);
  EXPECT_EQ(Trainer(1).snapshots, (std::set<std::uint64_t>{1, 2})) << "rank 0 may come back";
  world_.agent("a").Attach();
  ASSERT_OK(Back(0, 2, {}));
  world_.executor.RunReady();
  EXPECT_TRUE(Trainer(1).snapshots.empty());
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
}

TEST_F(ReturnSim, StreamsThatBreakCostNoSnapshotAndEndNoRollback) {
  world_.PublishAll("trainer", 1, SlowConsumer::kSnapshot, 1, 2);
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 2);
  proto::RollbackRequest request;
  request.set_version(1);
  world_.core->Rollback(request, [&](const Result<proto::RollbackReply>& got) { EXPECT_OK(got); });
  world_.agent("a").Die();
  world_.agent("b").Die();
  world_.executor.Advance(1s);
  for (const std::uint32_t rank : {0U, 1U}) {
    world_.agent(rank == 0 ? "a" : "b").Attach();
    ASSERT_OK(Back(rank, 2, {Snapshot(1, 2), Snapshot(2, 2)}));
  }
  Sync();
  EXPECT_EQ(Engine().live, 1U) << "what was rolled back to";
  for (const char* agent : {"a", "b"}) {
    world_.agent(agent).Die();
    world_.executor.Advance(1s);
    world_.agent(agent).Attach();
    ASSERT_OK(Back(agent == std::string("a") ? 0 : 1, 2, {Snapshot(1, 2), Snapshot(2, 2)}));
  }
  Sync(Selector::kPinned, 2);
  EXPECT_EQ(Engine().live, 2U);
}

TEST_F(ReturnSim, AllAgentsOfATrainerMayBeLostAtOnce) {
  world_.PublishAll("trainer", 2);
  world_.agent("a").Die();
  world_.agent("b").Die();
  world_.executor.Advance(1s);
  EXPECT_EQ(world_.core->counts().kept_versions, 0U) << "nobody is there to serve it";
  world_.agent("a").Attach();
  world_.agent("b").Attach();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  ASSERT_OK(Back(1, 2, {{.version = 2}}));
  world_.core->GetVersions({}, [&](const Result<proto::VersionsReply>& reply) {
    ASSERT_EQ(reply->versions_size(), 1);
    EXPECT_EQ(reply->versions(0).state(), "readable");
  });
  ReleaseAll(2);
  world_.executor.Advance(1s);
  EXPECT_FALSE(Released(0, 2));
  Sync();
  EXPECT_EQ(Engine().live, 2U);
  EXPECT_OK(Released(0, 2).value());
}

TEST_F(ReturnSim, WhoHasBroughtAVersionStillCountsWhenAllAgentsWereLost) {
  world_.PublishAll("trainer", 2);
  Sync();
  for (const char* agent : {"a", "b", "e"}) world_.agent(agent).Die();
  world_.executor.Advance(1s);
  for (const std::uint32_t rank : {0U, 1U}) {
    world_.agent(rank == 0 ? "a" : "b").Attach();
    ASSERT_OK(Back(rank, 2, {{.version = 2}}));
  }
  ReleaseAll(2);
  EXPECT_OK(Released(0, 2).value()) << "the engine, which is away, has it";
}

TEST_F(ReturnSim, ARankWhoseProcessEndedIsNotWaitedFor) {
  world_.PublishAll("trainer", 2);
  ReleaseAll(2);
  world_.Leave(Trainer(0));
  EXPECT_OK(Released(1, 2).value());
}

TEST_F(ReturnSim, ARankThatLeavesToComeBackAtOnceKeepsItsVersions) {
  world_.PublishAll("trainer", 2);
  ReleaseAll(2);
  proto::AgentMessage message;
  *message.mutable_leave_rank()->mutable_rank() = rpc::ToProto(Trainer(0).identity);
  message.mutable_leave_rank()->set_returns(true);
  world_.agent("a").Say(std::move(message));
  world_.executor.RunReady();
  EXPECT_FALSE(Released(1, 2));
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  Sync();
  EXPECT_EQ(Engine().live, 2U);
  EXPECT_OK(Released(1, 2).value());
}

TEST_F(ReturnSim, MemoryThatWasAboutToBeGivenBackIsGivenBackWhenASourceIsLost) {
  world_.PublishAll("trainer", 2, SlowConsumer::kSkip);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  world_.Release(Trainer(1), 2, 60s);
  EXPECT_FALSE(Released(1, 2)) << "a session reads it";
  world_.agent("a").Die();
  world_.executor.RunReady();
  EXPECT_OK(Released(1, 2).value());
}

TEST_F(ReturnSim, ASessionThatLostASourceIsMadeAgainWhenTheSourceIsBack) {
  world_.PublishAll("trainer", 2);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.agent("a").Die();
  world_.executor.Advance(1s);
  EXPECT_THAT(Engine().updated.value(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.agent("a").Attach();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  world_.executor.Advance(1s);
  EXPECT_OK(Engine().updated.value());
  EXPECT_EQ(Engine().live, 2U);
}

TEST_F(ReturnSim, TheOtherRanksMayPublishOnMeanwhile) {
  world_.PublishAll("trainer", 2);
  world_.agent("a").Die();
  world_.executor.Advance(1s);
  world_.Publish(Trainer(1), 3);
  EXPECT_OK(Trainer(1).published.value());
  world_.agent("a").Attach();
  ASSERT_OK(Back(0, 2, {{.version = 2}}));
  world_.Release(Trainer(0), 2, 60s);
  EXPECT_OK(Released(0, 2).value()) << "rank 1 holds that no more";
  world_.Publish(Trainer(0), 3);
  Sync();
  EXPECT_EQ(Engine().live, 3U);
}

}  // namespace
}  // namespace tensorbus::sim
