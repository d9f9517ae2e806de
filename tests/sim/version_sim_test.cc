#include <gtest/gtest.h>

#include "tensorbus/rpc/convert.h"
#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using daemon::SlowConsumer;
using ::testing::HasSubstr;
using testing::IsStatus;

class VersionSim : public ::testing::Test {
 protected:
  void Start() {
    world_.AddAgent("a");
    world_.AddAgent("b");
    world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world_.StartJob("engine", Role::kConsumer, 2, {"b"}, {});
  }
  void Sync(Selector selector = Selector::kLatest, std::uint64_t version = 0) {
    world_.UpdateAll("engine", selector, 10s, version);
    world_.executor.Advance(1s);
  }
  Outcome Released(std::uint32_t rank, std::uint64_t version) {
    return world_.worker("trainer", rank).released[version];
  }
  Status Registered(const World::JobOptions& options, Role role = Role::kConsumer,
                    std::uint32_t rank = 0, std::uint32_t count = 1,
                    const std::string& job = "other") {
    return world_.Register("b", job, role, rank, count, options).registered.value();
  }

  World world_;
};

// ---- giving memory back

TEST_F(VersionSim, HoldsMemoryUntilEveryReplicaHasTheVersion) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kWait);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  world_.Release(world_.worker("trainer", 1), 1, 30s);
  world_.executor.Advance(5s);
  EXPECT_FALSE(Released(0, 1));
  Sync();
  EXPECT_OK(Released(0, 1).value());
  EXPECT_OK(Released(1, 1).value());
}

TEST_F(VersionSim, NamesTheReplicaThatHoldsTheTrainerUp) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kWait);
  world_.Release(world_.worker("trainer", 0), 1, 2s);
  world_.executor.Advance(3s);
  EXPECT_THAT(Released(0, 1).value(), IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(Released(0, 1)->message(), HasSubstr("policy/engine replica 0 rank 0 of 2"));
}

TEST_F(VersionSim, WaitsForAtLeastSoManyReplicas) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kWait, 2);
  world_.Release(world_.worker("trainer", 0), 1, 2s);
  Sync();
  world_.executor.Advance(3s);
  EXPECT_THAT(Released(0, 1)->message(), HasSubstr("1 of at least 2 replicas"));
}

TEST_F(VersionSim, GivesMemoryBackAtOnceWhenConsumersMaySkip) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kSkip);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  EXPECT_OK(Released(0, 1).value());
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.executor.Advance(1s);
  EXPECT_FALSE(world_.worker("engine", 0).updated) << "version 1 may be overwritten already";
  world_.PublishAll("trainer", 2, SlowConsumer::kSkip);
  world_.executor.Advance(1s);
  EXPECT_EQ(world_.worker("engine", 0).live, 2U);
}

TEST_F(VersionSim, LetsRunningSessionsEndBeforeMemoryIsGivenBack) {
  Start();
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.PublishAll("trainer", 1, SlowConsumer::kSkip);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  EXPECT_EQ(world_.core->counts().sessions, 1U);
  EXPECT_FALSE(Released(0, 1));
  world_.executor.Advance(1s);
  EXPECT_OK(Released(0, 1).value());
  EXPECT_EQ(world_.worker("engine", 0).live, 1U);
}

TEST_F(VersionSim, OpensNoSessionOnMemoryThatIsAboutToBeGivenBack) {
  Start();
  World::JobOptions second;
  second.replica = 1;
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, second);
  second.replica = 2;
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, second);
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.PublishAll("trainer", 1, SlowConsumer::kSkip);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  ASSERT_FALSE(Released(0, 1));
  Worker& latest = world_.worker("engine", 0, 1);
  Worker& pinned = world_.worker("engine", 0, 2);
  world_.Update(latest, Selector::kLatest, 30s);
  world_.Update(pinned, Selector::kPinned, 30s, 1);
  EXPECT_EQ(world_.core->counts().sessions, 1U);
  EXPECT_FALSE(latest.updated) << "waits for what comes";
  EXPECT_THAT(pinned.updated.value(), IsStatus(Code::kNotFound, Reason::kStaleVersion));
}

TEST_F(VersionSim, HoldsMemoryUntilAllRanksHavePublished) {
  Start();
  world_.Publish(world_.worker("trainer", 0), 1, SlowConsumer::kSkip);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  world_.Release(world_.worker("trainer", 1), 1, 30s);
  EXPECT_FALSE(Released(0, 1));
  EXPECT_OK(Released(1, 1).value()) << "it has not published that";
  world_.Publish(world_.worker("trainer", 1), 1, SlowConsumer::kSkip);
  EXPECT_OK(Released(0, 1).value());
}

TEST_F(VersionSim, NoReplicaThatCannotTakeTheVersionHoldsTheTrainerUp) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  World::JobOptions other;
  other.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  world_.StartJob("misfit", Role::kConsumer, 1, {"b"}, other);
  EXPECT_OK(Registered({}, Role::kConsumer, 0, 2, "half"));
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.PublishAll("trainer", 1, SlowConsumer::kWait, 0);
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  EXPECT_OK(Released(0, 1).value());
}

TEST_F(VersionSim, SaysThatNobodyPublishedWhatShallBeReleased) {
  Start();
  world_.Release(world_.worker("trainer", 0), 1, 30s);
  EXPECT_EQ(Released(0, 1).value().code(), Code::kNotFound);
}

TEST_F(VersionSim, GivesMemoryBackAtOnceWhenASnapshotWasMade) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kSnapshot);
  EXPECT_OK(Released(0, 1).value());
  EXPECT_OK(Released(1, 1).value());
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 1U);
}

TEST_F(VersionSim, RefusesToOverwriteWhatIsBeingRead) {
  Start();
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.PublishAll("trainer", 1);
  world_.Publish(world_.worker("trainer", 0), 2);
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
}

// ---- keeping and rolling back

TEST_F(VersionSim, KeepsTheLastSnapshotsAndDropsOlderOnes) {
  Start();
  for (std::uint64_t version = 1; version <= 4; ++version) {
    world_.PublishAll("trainer", version, SlowConsumer::kSnapshot, 1, 2);
  }
  world_.executor.RunReady();
  EXPECT_EQ(world_.worker("trainer", 0).snapshots, (std::set<std::uint64_t>{3, 4}));
  EXPECT_EQ(world_.worker("trainer", 1).snapshots, (std::set<std::uint64_t>{3, 4}));
  Sync(Selector::kPinned, 3);
  EXPECT_EQ(world_.worker("engine", 0).live, 3U);
  Sync(Selector::kPinned, 2);
  EXPECT_THAT(world_.worker("engine", 0).updated.value(),
              IsStatus(Code::kNotFound, Reason::kStaleVersion));
  EXPECT_THAT(world_.worker("engine", 0).updated->message(), HasSubstr("kept: 3, 4"));
}

TEST_F(VersionSim, KeepsASnapshotForAsLongAsItIsRead) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kSnapshot, 1, 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 1);  // which its reading hinders not
  EXPECT_EQ(world_.worker("trainer", 0).snapshots, (std::set<std::uint64_t>{1, 2}));
  world_.executor.Advance(1s);
  EXPECT_EQ(world_.worker("engine", 0).live, 1U);
  EXPECT_EQ(world_.worker("trainer", 0).snapshots, std::set<std::uint64_t>{2});
}

TEST_F(VersionSim, RollsReplicasBackUntilSomethingNewIsPublished) {
  Start();
  world_.PublishAll("trainer", 1, SlowConsumer::kSnapshot, 1, 2);
  world_.PublishAll("trainer", 2, SlowConsumer::kSnapshot, 1, 2);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 2U);
  proto::RollbackRequest request;
  request.set_version(1);
  Result<proto::RollbackReply> reply = Status(Code::kUnknown, "");
  world_.core->Rollback(request, [&](Result<proto::RollbackReply> got) { reply = std::move(got); });
  ASSERT_OK(reply);
  EXPECT_EQ(reply->replica_count(), 1U);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 1U);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 1U) << "it stays there";
  world_.PublishAll("trainer", 3, SlowConsumer::kSnapshot, 1, 2);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 3U);
  request.set_version(9);
  world_.core->Rollback(request, [&](Result<proto::RollbackReply> got) { reply = std::move(got); });
  EXPECT_EQ(reply.status().code(), Code::kNotFound);
}

// ---- numbers and epochs

TEST_F(VersionSim, RefusesVersionsThatGoBack) {
  Start();
  world_.PublishAll("trainer", 5);
  for (const std::uint64_t version : {0U, 4U, 5U}) {
    world_.Publish(world_.worker("trainer", 0), version);
    EXPECT_FALSE(world_.worker("trainer", 0).published->ok()) << version;
  }
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  // Nothing could follow it.
  world_.Publish(world_.worker("trainer", 0), ~std::uint64_t{0});
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.PublishAll("trainer", 6);
}

TEST_F(VersionSim, RefusesAVersionTwiceAlsoWhileOtherRanksAreStillToPublishIt) {
  Start();
  Worker& worker = world_.worker("trainer", 0);
  for (const std::uint64_t version : {4U, 5U}) {
    world_.Publish(worker, version, SlowConsumer::kSnapshot);
    EXPECT_OK(worker.published.value());
  }
  for (const std::uint64_t version : {4U, 5U}) {
    world_.Publish(worker, version, SlowConsumer::kSnapshot);
    EXPECT_THAT(worker.published.value(),
                IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  }
}

TEST_F(VersionSim, RefusesPublishesOutOfBoundsOrWithoutTheirSnapshot) {
  Start();
  Worker& worker = world_.worker("trainer", 0);
  world_.Publish(worker, 0);
  EXPECT_THAT(worker.published.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.Publish(worker, 1, static_cast<SlowConsumer>(4));
  EXPECT_THAT(worker.published.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.Publish(worker, 1, SlowConsumer::kSnapshot, 1, daemon::kMaxKeptVersions);
  EXPECT_THAT(worker.published.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  worker.published.reset();
  proto::AgentMessage message;
  proto::Publish& publish = *message.mutable_publish();
  publish.set_request(worker.request);
  *publish.mutable_rank() = rpc::ToProto(worker.identity);
  publish.set_version(1);
  publish.set_policy(static_cast<std::uint32_t>(SlowConsumer::kSnapshot));
  world_.agent("a").Say(std::move(message));
  world_.executor.RunReady();
  EXPECT_EQ(worker.published.value().code(), Code::kFailedPrecondition);
  EXPECT_THAT(worker.published->message(), HasSubstr("its agent made none"));
  EXPECT_EQ(world_.core->counts().kept_versions, 0U);
}

TEST_F(VersionSim, RefusesRanksThatPublishWithDifferentPolicies) {
  Start();
  world_.Publish(world_.worker("trainer", 0), 1, SlowConsumer::kWait);
  world_.Publish(world_.worker("trainer", 1), 1, SlowConsumer::kSkip);
  EXPECT_THAT(world_.worker("trainer", 1).published.value(),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.Publish(world_.worker("trainer", 1), 1, SlowConsumer::kWait);
  EXPECT_OK(world_.worker("trainer", 1).published.value());
}

TEST_F(VersionSim, KeepsNoMoreVersionsThanItsBound) {
  Start();
  Worker& worker = world_.worker("trainer", 0);  // the other rank publishes none of them
  for (std::uint64_t version = 1; version <= daemon::kMaxKeptVersions; ++version) {
    world_.Publish(worker, version, SlowConsumer::kSnapshot);
    ASSERT_OK(worker.published.value());
  }
  world_.Publish(worker, daemon::kMaxKeptVersions + 1, SlowConsumer::kSnapshot);
  EXPECT_THAT(worker.published.value(), IsStatus(Code::kResourceExhausted, Reason::kBusy));
}

TEST_F(VersionSim, AProcessWithoutANumberIsNeverTheSameAgain) {
  world_.AddAgent("a");
  World::JobOptions options;
  options.pid = 0;
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, options);
  world_.Leave(world_.worker("trainer", 0));
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, options);
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 2U);
}

TEST_F(VersionSim, BeginsANewEpochWhenTheTrainerRestarts) {
  Start();
  world_.PublishAll("trainer", 5);
  Sync();
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 1U);
  for (const std::uint32_t rank : {0U, 1U}) world_.Leave(world_.worker("trainer", rank));
  World::JobOptions again;
  again.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 4, {"a"}, again);  // with another layout, too
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 2U);
  EXPECT_EQ(world_.worker("trainer", 0).latest, 5U);
  world_.Publish(world_.worker("trainer", 0), 3);
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(world_.worker("trainer", 0).published->message(), HasSubstr("go on from 6"));
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    world_.Publish(world_.worker("trainer", rank), 6);
    EXPECT_OK(world_.worker("trainer", rank).published.value());
  }
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 6U);
}

TEST_F(VersionSim, AllRanksOfATrainerHearTheSameLatestVersionWheneverTheyCome) {
  Start();
  world_.PublishAll("trainer", 5);
  for (const std::uint32_t rank : {0U, 1U}) world_.Leave(world_.worker("trainer", rank));
  World::JobOptions again;
  again.pid = 2000;
  const auto latest = [&](std::uint32_t rank, const World::JobOptions& options) {
    Worker& worker = world_.Register("a", "trainer", Role::kProducer, rank, 2, options);
    EXPECT_OK(worker.registered.value());
    return worker.latest;
  };
  EXPECT_EQ(latest(0, again), 5U);
  world_.Publish(world_.worker("trainer", 0), 6);
  EXPECT_EQ(latest(1, again), 5U) << "it begins where the first rank began";
  world_.Publish(world_.worker("trainer", 1), 6);
  EXPECT_OK(world_.worker("trainer", 1).published.value());
  EXPECT_EQ(world_.Register("b", "late", Role::kConsumer, 0, 1, {}).latest, 6U);
  // Another run in the same processes: its ranks hear the same, whichever comes first.
  for (const std::uint32_t rank : {0U, 1U}) world_.Leave(world_.worker("trainer", rank));
  for (const std::uint32_t rank : {0U, 1U}) {
    EXPECT_EQ(latest(rank, again), 6U);
    world_.Publish(world_.worker("trainer", rank), 7);
    EXPECT_OK(world_.worker("trainer", rank).published.value());
  }
  // One that comes back goes on from what it published.
  world_.Leave(world_.worker("trainer", 0));
  again.known_epoch = world_.worker("trainer", 1).epoch;
  again.live_version = 7;
  EXPECT_EQ(latest(0, again), 7U);
}

TEST_F(VersionSim, ForgetsEmptyChannelsAndNoEpochComesTwice) {
  Start();
  world_.PublishAll("trainer", 5);
  auto visit = [&, pid = 1000U](int number) mutable {
    World::JobOptions options;
    options.pid = ++pid;  // another process every time
    options.channel = "run" + std::to_string(number);
    Worker& worker = world_.Register("a", "once", Role::kProducer, 0, 1, options);
    EXPECT_OK(worker.registered.value()) << number;
    world_.Publish(worker, 9);
    const std::uint64_t epoch = worker.epoch;
    world_.Leave(worker);
    world_.executor.Advance(1s);
    return epoch;
  };
  EXPECT_EQ(visit(0), 1U);
  EXPECT_EQ(visit(0), 2U);
  EXPECT_EQ(visit(0), 3U);
  for (int number = 1; number < 1200; ++number) visit(number);
  EXPECT_EQ(visit(0), 4U) << "forgotten meanwhile";
  world_.PublishAll("trainer", 6);  // what is in use is not
}

TEST_F(VersionSim, NamesTheRemedyWhenAllChannelsAreInUse) {
  world_.AddAgent("a");
  Status last;
  for (int number = 0; number < 1025; ++number) {
    World::JobOptions options;
    options.channel = "run" + std::to_string(number);
    last = world_.Register("a", "job", Role::kProducer, 0, 1, options).registered.value();
    if (number < 1024) {
      ASSERT_OK(last);
    }
  }
  EXPECT_THAT(last, IsStatus(Code::kResourceExhausted, Reason::kBusy));
  EXPECT_THAT(last.message(), HasSubstr("stop the jobs of one"));
}

TEST_F(VersionSim, RefusesPublishesOfAnEpochThatIsOver) {
  Start();
  world_.Leave(world_.worker("trainer", 0));
  World::JobOptions again;
  again.pid = 2000;
  ASSERT_OK(world_.Register("a", "trainer", Role::kProducer, 0, 2, again).registered.value());
  world_.Publish(world_.worker("trainer", 1), 9);  // its old process
  EXPECT_THAT(world_.worker("trainer", 1).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(VersionSim, AnAgentOfTheLastEpochTakesNoRankOfThisOneAlong) {
  Start();
  world_.Leave(world_.worker("trainer", 0));
  World::JobOptions again;
  again.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 2, {"b"}, again);  // rank 1 was at agent a
  world_.agent("a").Die();
  world_.executor.RunReady();
  world_.PublishAll("trainer", 1);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 1U);
}

TEST_F(VersionSim, RefusesAProcessOfAnEpochThatIsOver) {
  Start();
  for (const std::uint32_t rank : {0U, 1U}) world_.Leave(world_.worker("trainer", rank));
  World::JobOptions again;
  again.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, again);
  world_.Leave(world_.worker("trainer", 1));
  World::JobOptions late;
  late.pid = 3000;
  late.known_epoch = 1;
  const Status status = Registered(late, Role::kProducer, 1, 2, "trainer");
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(status.message(), HasSubstr("belongs to epoch 1"));
}

TEST_F(VersionSim, KeepsTheEpochForAProcessThatComesBackThroughANewAgent) {
  Start();
  world_.agent("a").Die();
  world_.executor.RunReady();
  world_.AddAgent("c");
  for (const std::uint32_t rank : {0U, 1U}) {
    const Worker& worker = world_.Register("c", "trainer", Role::kProducer, rank, 2, {});
    EXPECT_OK(worker.registered.value());
    EXPECT_EQ(worker.epoch, 1U);
  }
}

TEST_F(VersionSim, RefusesASecondPublisher) {
  Start();
  const Status status = Registered({}, Role::kProducer, 0, 1, "intruder");
  EXPECT_THAT(status, IsStatus(Code::kAlreadyExists, Reason::kSecondPublisher));
  EXPECT_THAT(status.message(), HasSubstr("produced by job trainer"));
}

TEST_F(VersionSim, RefusesARankThatIsThereAlready) {
  Start();
  EXPECT_EQ(Registered({}, Role::kConsumer, 1, 2, "engine").code(), Code::kAlreadyExists);
  EXPECT_EQ(Registered({}, Role::kProducer, 1, 2, "trainer").code(), Code::kAlreadyExists);
}

TEST_F(VersionSim, NeverGoesBackWhenTheDaemonRestarts) {
  Start();
  world_.PublishAll("trainer", 5);
  Sync();
  world_.RestartDaemon(100);
  World::JobOptions back;
  back.known_epoch = 1;
  back.live_version = 5;
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, back);
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, back);
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 1U);
  for (const std::uint64_t version : {4U, 5U}) {
    world_.Publish(world_.worker("trainer", 0), version);
    EXPECT_FALSE(world_.worker("trainer", 0).published->ok()) << version;
  }
  world_.PublishAll("trainer", 6);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 6U);
}

TEST_F(VersionSim, ADirtyReplicaServesNoVersion) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  World::JobOptions engine;
  engine.flip = FlipMode::kInPlace;
  engine.live_version = 5;
  engine.dirty = true;
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, engine);
  const Worker& worker = world_.worker("engine", 0);
  world_.UpdateAll("engine", Selector::kLatest, 2s);
  EXPECT_FALSE(worker.updated) << "nobody can bring it one yet";
  world_.executor.Advance(3s);
  EXPECT_EQ(worker.updated.value().code(), Code::kDeadlineExceeded);
  Sync(Selector::kPinned, 5);
  EXPECT_THAT(worker.updated.value(), IsStatus(Code::kNotFound, Reason::kStaleVersion));
  World::JobOptions back;
  back.known_epoch = 1;
  back.live_version = 5;
  back.held = {{.version = 5}};
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, back);
  world_.executor.Advance(11s);
  world_.Release(world_.worker("trainer", 0), 5, 30s);
  EXPECT_FALSE(Released(0, 5)) << "it has not taken the version";
  Sync();
  EXPECT_OK(worker.updated.value()) << "the version that it held, once more";
  EXPECT_OK(Released(0, 5).value());
}

TEST_F(VersionSim, BeginsAboveOldNumbersWhenOnlyEnginesRememberThem) {
  Start();
  world_.RestartDaemon(100);
  World::JobOptions back;
  back.known_epoch = 3;
  back.live_version = 12;
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, back);
  World::JobOptions fresh;
  fresh.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, fresh);
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 4U);
  world_.Publish(world_.worker("trainer", 0), 12);
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(VersionSim, BeginsAboveOldNumbersThatOnlyATrainerWhichIsGoneRemembered) {
  world_.AddAgent("a");
  World::JobOptions back;
  back.known_epoch = 3;
  back.live_version = 12;
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, back);
  EXPECT_EQ(world_.worker("trainer", 0).latest, 12U);
  world_.Leave(world_.worker("trainer", 0));
  World::JobOptions fresh;
  fresh.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, fresh);
  world_.Publish(world_.worker("trainer", 0), 12);
  EXPECT_THAT(world_.worker("trainer", 0).published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(VersionSim, BeginsAboveAnEpochThatOnlyAnAgentRemembers) {
  Start();
  world_.RestartDaemon(100);
  World::JobOptions fresh;
  fresh.pid = 2000;
  fresh.seen_epoch = 5;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, fresh);
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 6U);
}

TEST_F(VersionSim, RaisesTheEpochOfATrainerThatBeganBeforeAnAgentToldOfAGreaterOne) {
  Start();
  world_.RestartDaemon(100);
  World::JobOptions fresh;
  fresh.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, fresh);
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 1U);
  World::JobOptions engine;
  engine.seen_epoch = 5;
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, engine);
  world_.PublishAll("trainer", 7);
  Sync();
  EXPECT_EQ(world_.worker("engine", 0).live, 7U);
  EXPECT_EQ(world_.agent("b").prepared_epoch, 6U);
}

TEST_F(VersionSim, RefusesATrainerOfAnEpochThatAnAgentKnowsToBeOver) {
  Start();
  world_.RestartDaemon(100);
  World::JobOptions engine;
  engine.seen_epoch = 5;
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, engine);
  World::JobOptions back;
  back.known_epoch = 4;
  back.live_version = 9;
  EXPECT_THAT(world_.Register("a", "trainer", Role::kProducer, 0, 2, back).registered.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
}

TEST_F(VersionSim, RefusesAnEpochBeyondCounting) {
  Start();
  World::JobOptions broken;
  broken.replica = 1;
  broken.seen_epoch = ~std::uint64_t{0};
  EXPECT_THAT(world_.Register("b", "engine", Role::kConsumer, 0, 2, broken).registered.value(),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 1U);
}

TEST_F(VersionSim, ARegistrationThatIsRefusedRaisesNoEpoch) {
  Start();
  const auto epoch = [this] {
    std::uint64_t now = 0;
    world_.core->GetStatus(
        {}, [&](const Result<proto::StatusReply>& reply) { now = reply->channels(0).epoch(); });
    return now;
  };
  World::JobOptions seen;
  seen.seen_epoch = 9;
  EXPECT_THAT(Registered(seen, Role::kProducer, 0, 1, "rival"),
              IsStatus(Code::kAlreadyExists, Reason::kSecondPublisher));
  EXPECT_EQ(epoch(), 1U);
  World::JobOptions misfit = seen;
  misfit.flip = static_cast<FlipMode>(7);
  EXPECT_THAT(Registered(misfit), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_EQ(epoch(), 1U);
  // One that is refused only when it is put together with the others of its replica.
  EXPECT_OK(Registered({}, Role::kConsumer, 0, 2));
  World::JobOptions partial = seen;
  partial.change = [](RankLayout& layout) {
    const Range part[] = {{.lo = 600, .hi = World::kElements}};
    layout.tensors[0].boxes = {Box(std::span<const Range>(part))};
  };
  EXPECT_FALSE(Registered(partial, Role::kConsumer, 1, 2).ok());
  EXPECT_EQ(epoch(), 1U);
  EXPECT_OK(Registered(seen, Role::kConsumer, 1, 2));
  EXPECT_EQ(epoch(), 10U);
}

// ---- what fits

TEST_F(VersionSim, NamesATensorTheChannelDoesNotHave) {
  Start();
  World::JobOptions options;
  options.change = [](RankLayout& layout) { layout.tensors[1].spec.name = "norms"; };
  const Status status = Registered(options);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kUnknownTensor));
  EXPECT_THAT(status.message(), HasSubstr("\"norms\""));
  EXPECT_THAT(status.message(), HasSubstr("nearest names: norm"));
}

TEST_F(VersionSim, NamesADtypeThatDiffers) {
  Start();
  World::JobOptions options;
  options.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  const Status status = Registered(options);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
  EXPECT_THAT(status.message(), HasSubstr("\"w\" as i32, the channel has it as f32"));
}

TEST_F(VersionSim, NamesAShapeThatDiffers) {
  Start();
  World::JobOptions options;
  options.change = [](RankLayout& layout) {
    const std::uint64_t dims[] = {17};
    layout.tensors[1].spec.shape = Shape::Create(dims).value();
    layout.tensors[1].boxes = {Box::Whole(layout.tensors[1].spec.shape)};
  };
  const Status status = Registered(options);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  EXPECT_THAT(status.message(), HasSubstr("global shape [17], the channel has [16]"));
}

TEST_F(VersionSim, NamesTensorsThatAreNeitherHeldNorLeftOut) {
  Start();
  World::JobOptions options;
  options.change = [](RankLayout& layout) { layout.tensors.pop_back(); };
  const Status status = Registered(options);
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  EXPECT_THAT(status.message(), HasSubstr("norm"));
  options.leave_out = {"norm"};
  EXPECT_OK(Registered(options));
}

TEST_F(VersionSim, ChecksAConsumerThatCameFirstOnceTheProducerIsThere) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  World::JobOptions options;
  options.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, options);
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.executor.RunReady();
  EXPECT_THAT(world_.worker("engine", 0).updated.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
}

TEST_F(VersionSim, RefusesRanksThatDoNotAgree) {
  Start();
  EXPECT_OK(Registered({}, Role::kConsumer, 0, 2));
  EXPECT_THAT(Registered({}, Role::kConsumer, 1, 3),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  World::JobOptions in_place;
  in_place.flip = FlipMode::kInPlace;
  EXPECT_THAT(Registered(in_place, Role::kConsumer, 1, 2),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
  World::JobOptions elsewhere;
  elsewhere.channel = "reward";
  EXPECT_OK(Registered(elsewhere, Role::kProducer, 0, 2, "critic"));
  EXPECT_THAT(Registered(elsewhere, Role::kProducer, 1, 3, "critic"),
              IsStatus(Code::kInvalidArgument, Reason::kLayoutMismatch));
}

TEST_F(VersionSim, RefusesAnUnknownFlipOrProof) {
  Start();
  World::JobOptions options;
  options.flip = static_cast<FlipMode>(3);
  EXPECT_THAT(Registered(options), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  options = {};
  options.proof = static_cast<Proof>(5);
  EXPECT_THAT(Registered(options), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus::sim
