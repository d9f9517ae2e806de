#include <gtest/gtest.h>
#include <set>

#include "tensorbus/rpc/convert.h"
#include "tensorbus/rpc/protocol.h"
#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using daemon::SlowConsumer;
using ::testing::HasSubstr;
using testing::IsStatus;

class SessionSim : public ::testing::Test {
 protected:
  void Start(const World::JobOptions& engine = {}) {
    world_.AddAgent("a");
    world_.AddAgent("b");
    world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world_.StartJob("engine", Role::kConsumer, 3, {"b"}, engine);
  }
  void StartInPlace() {
    World::JobOptions engine;
    engine.flip = FlipMode::kInPlace;
    Start(engine);
  }
  /// The engine serves version 7, and 8 is published.
  void StartInPlaceAtSevenOfEight() {
    StartInPlace();
    world_.PublishAll("trainer", 7);
    world_.UpdateAll("engine", Selector::kLatest, 10s);
    ExpectServes(7);
    world_.PublishAll("trainer", 8);
  }
  bool Updated(std::uint32_t replica = 0) {
    for (const Worker* worker : world_.WorkersOf("engine", replica)) {
      if (!worker->updated) return false;
    }
    return true;
  }
  void ExpectServes(std::uint64_t version, std::uint32_t replica = 0) {
    ASSERT_TRUE(world_.executor.AdvanceUntil([&] { return Updated(replica); }, 60s));
    for (const Worker* worker : world_.WorkersOf("engine", replica)) {
      EXPECT_OK(*worker->updated) << worker->identity.ToString();
      EXPECT_EQ(worker->live, version) << worker->identity.ToString();
    }
  }
  /// All ranks of the replica learn of the same failure.
  Status Failure(std::uint32_t replica = 0) {
    EXPECT_TRUE(world_.executor.AdvanceUntil([&] { return Updated(replica); }, 60s));
    Status first;
    for (const Worker* worker : world_.WorkersOf("engine", replica)) {
      if (!worker->updated) continue;
      EXPECT_FALSE(worker->updated->ok()) << worker->identity.ToString();
      first = *worker->updated;
    }
    return first;
  }
  proto::ReplicaStatus ReplicaOf(std::uint32_t number) {
    proto::ReplicaStatus out;
    world_.core->GetStatus({}, [&](Result<proto::StatusReply> reply) {
      for (const auto& replica : reply->channels(0).replicas()) {
        if (replica.replica() == number) out = replica;
      }
    });
    return out;
  }

  World world_;
};

TEST_F(SessionSim, BringsAVersionToAReplica) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(7);
  EXPECT_EQ(ReplicaOf(0).live_version(), 7U);
  world_.ExpectQuiet();
}

TEST_F(SessionSim, TellsACapabilityOfEachSessionToThoseWhoTakePart) {
  Start();
  world_.AddAgent("onlooker");
  World::JobOptions elsewhere;
  elsewhere.channel = "reward";
  world_.StartJob("critic", Role::kConsumer, 1, {"onlooker"}, elsewhere);
  std::set<std::string> all;
  for (std::uint64_t version = 1; version <= 2; ++version) {
    world_.PublishAll("trainer", version);
    world_.UpdateAll("engine", Selector::kLatest, 10s);
    ExpectServes(version);
  }
  ASSERT_EQ(world_.agent("b").capabilities.size(), 2U);
  for (const auto& [session, capability] : world_.agent("b").capabilities) {
    EXPECT_EQ(capability.size(), 32U);
    EXPECT_EQ(world_.agent("a").capabilities.at(session), capability);
    all.insert(capability);
  }
  EXPECT_EQ(all.size(), 2U) << "used twice";
  EXPECT_TRUE(world_.agent("onlooker").capabilities.empty());
}

TEST_F(SessionSim, LetsEitherJobStartFirst) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  world_.StartJob("engine", Role::kConsumer, 3, {"b", "a"}, {});
  world_.UpdateAll("engine", Selector::kLatest, 30s);
  world_.executor.Advance(3s);
  world_.StartJob("trainer", Role::kProducer, 2, {"a", "b"}, {});
  world_.PublishAll("trainer", 1);
  ExpectServes(1);
}

TEST_F(SessionSim, StartsKnownPlansWithOneMessage) {
  Start();
  for (std::uint64_t version = 1; version <= 3; ++version) {
    world_.PublishAll("trainer", version);
    world_.UpdateAll("engine", Selector::kNext, 10s);
    ExpectServes(version);
    EXPECT_EQ(world_.agent("b").received[Received::kPrepare], static_cast<int>(version));
    EXPECT_EQ(world_.agent("b").received[Received::kGo], 1) << "only the first one negotiates";
  }
}

TEST_F(SessionSim, CountsReplicasThatTookTheVersionAndLeft) {
  Start();
  world_.StartJob("engine", Role::kConsumer, 3, {"b"}, {.replica = 1});
  world_.PublishAll("trainer", 1, SlowConsumer::kWait, /*min_replicas=*/2);
  world_.UpdateAll("engine", Selector::kNext, 10s, 0, 0);
  ExpectServes(1, 0);
  for (Worker* worker : world_.WorkersOf("engine", 0)) world_.Leave(*worker);
  world_.UpdateAll("engine", Selector::kNext, 10s, 0, 1);
  ExpectServes(1, 1);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    Worker& trainer = world_.worker("trainer", rank);
    world_.Release(trainer, 1, 10s);
    ASSERT_TRUE(world_.executor.AdvanceUntil([&] { return trainer.released[1].has_value(); }, 60s));
    EXPECT_OK(*trainer.released[1]);
  }
}

TEST_F(SessionSim, ServesSeveralReplicasAtOnce) {
  Start();
  World::JobOptions second;
  second.replica = 1;
  world_.StartJob("engine", Role::kConsumer, 2, {"a", "b"}, second);
  world_.PublishAll("trainer", 4);
  world_.UpdateAll("engine", Selector::kLatest, 10s, 0, 0);
  world_.UpdateAll("engine", Selector::kLatest, 10s, 0, 1);
  EXPECT_EQ(world_.core->counts().sessions, 2U);
  ExpectServes(4, 0);
  ExpectServes(4, 1);
  world_.ExpectQuiet();
}

TEST_F(SessionSim, KeepsChannelsApart) {
  Start();
  World::JobOptions reward;
  reward.channel = "reward";
  world_.StartJob("critic", Role::kProducer, 1, {"a"}, reward);
  world_.StartJob("scorer", Role::kConsumer, 1, {"b"}, reward);
  world_.PublishAll("trainer", 7);
  world_.Publish(world_.worker("critic", 0, 0, "reward"), 1);
  world_.UpdateAll("scorer", Selector::kLatest, 10s);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(7);
  EXPECT_EQ(world_.worker("scorer", 0, 0, "reward").live, 1U);
}

TEST_F(SessionSim, TellsAReplicaThatItServesTheLatestAlready) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(7);
  EXPECT_EQ(world_.agent("b").received[Received::kPrepare], 1);
}

TEST_F(SessionSim, WaitsForTheNextVersion) {
  Start();
  world_.PublishAll("trainer", 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(1);
  world_.UpdateAll("engine", Selector::kNext, 10s);
  world_.executor.Advance(5s);
  EXPECT_FALSE(Updated());
  world_.PublishAll("trainer", 2);
  ExpectServes(2);
}

TEST_F(SessionSim, NamesTheRankThatNeverAsks) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.Update(world_.worker("engine", 0), Selector::kLatest, 3s);
  world_.Update(world_.worker("engine", 1), Selector::kLatest, 3s);
  world_.executor.Advance(3s + 1s);
  const Worker& worker = world_.worker("engine", 0);
  ASSERT_TRUE(worker.updated);
  EXPECT_THAT(*worker.updated, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(worker.updated->message(), HasSubstr("policy/engine replica 0 rank 2 of 3"));
  EXPECT_THAT(worker.updated->message(), HasSubstr("has not asked"));
}

TEST_F(SessionSim, NamesTheProducerRankThatNeverPublishes) {
  Start();
  world_.Publish(world_.worker("trainer", 0), 7);
  world_.UpdateAll("engine", Selector::kLatest, 3s);
  const Status status = Failure();
  EXPECT_THAT(status, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(status.message(),
              HasSubstr("policy/trainer rank 1 of 2 has not published version 7"));
}

TEST_F(SessionSim, NamesTheProducerThatNeverComes) {
  world_.AddAgent("b");
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, {});
  world_.UpdateAll("engine", Selector::kLatest, 3s);
  EXPECT_THAT(Failure().message(), HasSubstr("a producer of channel policy has not registered"));
}

TEST_F(SessionSim, RefusesRanksThatAskForDifferentVersions) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.Update(world_.worker("engine", 0), Selector::kLatest, 3s);
  world_.Update(world_.worker("engine", 1), Selector::kLatest, 3s);
  world_.Update(world_.worker("engine", 2), Selector::kPinned, 3s, 7);
  EXPECT_THAT(Failure(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(SessionSim, RefusesRequestsThatMeanNothingAndASecondOneAtATime) {
  Start();
  Worker& worker = world_.worker("engine", 0);
  world_.Update(worker, static_cast<Selector>(4), 5s);
  EXPECT_THAT(worker.updated.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.Update(worker, Selector::kPinned, 5s, 0);
  EXPECT_THAT(worker.updated.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  world_.Update(worker, Selector::kLatest, 5s);
  EXPECT_FALSE(worker.updated);
  world_.Update(worker, Selector::kLatest, 5s);
  EXPECT_THAT(worker.updated.value(), IsStatus(Code::kFailedPrecondition, Reason::kBusy));
}

TEST_F(SessionSim, ARequestThatIsTakenBackEndsItsSessionForAllRanks) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  proto::AgentMessage message;
  *message.mutable_cancel_request()->mutable_rank() =
      rpc::ToProto(world_.worker("engine", 1).identity);
  world_.agent("b").Say(std::move(message));
  EXPECT_THAT(Failure(), IsStatus(Code::kCancelled, Reason::kCancelled));
  EXPECT_EQ(world_.core->counts().sessions, 0U);
}

TEST_F(SessionSim, EndsWhenPlansDiffer) {
  Start();
  world_.agent("b").plan = "another plan";
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_THAT(Failure(), IsStatus(Code::kAborted, Reason::kPlanMismatch));
  EXPECT_EQ(world_.worker("engine", 0).live, 0U);
  world_.ExpectQuiet();
}

TEST_F(SessionSim, NegotiatesAgainAfterAKnownPlanDidNotFit) {
  Start();
  world_.PublishAll("trainer", 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(1);
  world_.PublishAll("trainer", 2);
  world_.agent("b").fail_prepare =
      Status(Code::kAborted, "it plans otherwise", Reason::kPlanMismatch);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_THAT(Failure(), IsStatus(Code::kAborted, Reason::kPlanMismatch));
  world_.agent("b").fail_prepare.reset();
  world_.agent("a").plan = world_.agent("b").plan = "another plan";
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(2);
  EXPECT_EQ(world_.agent("b").received[Received::kGo], 2);
}

TEST_F(SessionSim, RefusesToFlipWhenATargetHoldsOtherBytes) {
  Start();
  world_.agent("b").corrupt_target = 1;
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  const Status status = Failure();
  EXPECT_THAT(status, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  EXPECT_THAT(status.message(), HasSubstr("policy/engine replica 0 rank 1 of 3"));
  EXPECT_EQ(world_.agent("b").received[Received::kFlipPrepare], 0);
  for (const Worker* worker : world_.WorkersOf("engine")) EXPECT_EQ(worker->live, 0U);
}

TEST_F(SessionSim, RefusesToFlipWhenASourceCountedOtherBytes) {
  Start();
  world_.agent("a").corrupt_source = 1;
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  const Status status = Failure();
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  EXPECT_THAT(status.message(), HasSubstr("policy/trainer rank 1 of 2"));
  EXPECT_EQ(world_.agent("b").received[Received::kFlipPrepare], 0);
}

TEST_F(SessionSim, RefusesToFlipOnReceiptsOfAnotherEpoch) {
  Start();
  world_.agent("b").stale_receipts = true;
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_THAT(Failure(), IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_EQ(world_.agent("b").received[Received::kFlipPrepare], 0);
  for (const Worker* worker : world_.WorkersOf("engine")) EXPECT_EQ(worker->live, 0U);
}

// ---- somebody dies or falls silent ------------------------------------------------------------

constexpr Received kSteps[] = {Received::kPrepare, Received::kGo, Received::kFinish,
                               Received::kFlipPrepare, Received::kFlipCommit};

TEST_F(SessionSim, TellsEverybodyWhenTheEnginesAgentDiesAtAnyStep) {
  for (const Received step : kSteps) {
    for (const FlipMode flip : {FlipMode::kShadow, FlipMode::kInPlace}) {
      SCOPED_TRACE(::testing::Message() << "step " << step << " flip " << static_cast<int>(flip));
      World world;
      for (const char* name : {"a", "b", "c"}) world.AddAgent(name);
      World::JobOptions engine;
      engine.flip = flip;
      world.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
      world.StartJob("engine", Role::kConsumer, 2, {"b", "c"}, engine);
      if (step == Received::kFinish) continue;  // comes to sources only
      world.agent("c").die_on = step;
      world.PublishAll("trainer", 7);
      world.UpdateAll("engine", Selector::kLatest, 5s);
      const Worker& survivor = world.worker("engine", 0);
      ASSERT_TRUE(world.executor.AdvanceUntil([&] { return survivor.updated.has_value(); }, 6s));
      EXPECT_THAT(*survivor.updated, IsStatus(Code::kUnavailable, Reason::kPeerLost));
      EXPECT_THAT(survivor.updated->message(), HasSubstr("policy/engine replica 0 rank 1 of 2"));
      world.ExpectQuiet();
      EXPECT_EQ(world.core->counts().agents, 2U);
      // The trainer is not held up by a replica that is gone.
      world.Release(world.worker("trainer", 0), 7, 1s);
      world.executor.Advance(2s);
      EXPECT_TRUE(world.worker("trainer", 0).released[7]);
    }
  }
}

TEST_F(SessionSim, TellsEverybodyWhenTheTrainersAgentDiesAtAnyStep) {
  for (const Received step : {Received::kPrepare, Received::kGo, Received::kFinish}) {
    SCOPED_TRACE(::testing::Message() << "step " << step);
    World world;
    world.AddAgent("a");
    world.AddAgent("b");
    world.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world.StartJob("engine", Role::kConsumer, 2, {"b"}, {});
    world.agent("a").die_on = step;
    world.PublishAll("trainer", 7);
    world.UpdateAll("engine", Selector::kLatest, 5s);
    const Worker& worker = world.worker("engine", 0);
    ASSERT_TRUE(world.executor.AdvanceUntil([&] { return worker.updated.has_value(); }, 6s));
    EXPECT_THAT(*worker.updated, IsStatus(Code::kUnavailable, Reason::kPeerLost));
    EXPECT_THAT(worker.updated->message(), HasSubstr("policy/trainer rank"));
    EXPECT_EQ(worker.live, 0U);
    world.ExpectQuiet();
    EXPECT_EQ(world.core->counts().kept_versions, 0U);
  }
}

TEST_F(SessionSim, EndsByTheDeadlineWhenAnAgentDoesNothing) {
  for (const Received step : kSteps) {
    SCOPED_TRACE(::testing::Message() << "step " << step);
    World world;
    world.AddAgent("a");
    world.AddAgent("b");
    world.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world.StartJob("engine", Role::kConsumer, 2, {"b"}, {});
    world.agent(step == Received::kFinish ? "a" : "b").mute.insert(step);
    world.PublishAll("trainer", 7);
    world.UpdateAll("engine", Selector::kLatest, 5s);
    const Worker& worker = world.worker("engine", 1);
    ASSERT_TRUE(world.executor.AdvanceUntil([&] { return worker.updated.has_value(); }, 6s));
    EXPECT_THAT(*worker.updated, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
    EXPECT_THAT(worker.updated->message(),
                HasSubstr(step == Received::kFinish ? "policy/trainer rank 0 of 2"
                                                    : "policy/engine replica 0 rank 0 of 2"));
    world.ExpectQuiet();
  }
}

TEST_F(SessionSim, RefusesAnAgentThatSpeaksAnotherProtocol) {
  FakeAgent& agent = world_.AddAgent("a");
  agent.Die();
  world_.executor.RunReady();
  agent.protocol = rpc::kControlProtocol + 1;
  agent.Attach();
  world_.executor.RunReady();
  ASSERT_TRUE(agent.closed());
  EXPECT_THAT(*agent.closed(), IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
  EXPECT_THAT(agent.closed()->message(), HasSubstr("install the same release"));
  EXPECT_EQ(world_.core->counts().agents, 0U);
}

TEST_F(SessionSim, LosesAnAgentThatFallsSilent) {
  Start();
  world_.agent("b").silent = true;
  world_.executor.Advance(15s);
  EXPECT_EQ(world_.core->counts().agents, 1U);
  EXPECT_EQ(world_.core->counts().ranks, 2U);
}

TEST_F(SessionSim, NeedsNoSourceThatHasFinished) {
  Start();
  world_.PublishAll("trainer", 7, SlowConsumer::kSkip);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  Worker& trainer = world_.worker("trainer", 0);
  world_.Release(trainer, 7, 10s);
  auto flips = [&] { return world_.agent("b").received[Received::kFlipPrepare] != 0; };
  ASSERT_TRUE(world_.executor.AdvanceUntil(flips, 5s));
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  ASSERT_TRUE(trainer.released[7]) << "nobody reads its memory any more";
  EXPECT_OK(*trainer.released[7]);
  world_.agent("a").Die();
  ExpectServes(7);
}

TEST_F(SessionSim, AbortsWhenAWorkerLeavesMidway) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.Leave(world_.worker("engine", 2));
  const Status status = *world_.worker("engine", 0).updated;
  EXPECT_THAT(status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_THAT(status.message(), HasSubstr("rank 2 of 3 was lost: worker process 4711 ended"));
}

TEST_F(SessionSim, SettlesUnderRandomLossOfMessages) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    World world;
    world.AddAgent("a");
    world.AddAgent("b");
    std::uint64_t state = seed * 0x9e3779b97f4a7c15U;
    const auto random = [&state] {
      state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9U;
      state ^= state >> 27;
      return state += 0x9e3779b97f4a7c15U;
    };
    world.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    World::JobOptions engine;
    engine.flip = seed % 2 == 0 ? FlipMode::kShadow : FlipMode::kInPlace;
    world.StartJob("engine", Role::kConsumer, 3, {"b"}, engine);
    world.PublishAll("trainer", 1);
    world.agent("b").random = random;
    world.agent("a").random = random;
    world.agent("b").loss_per_mille = 150;
    world.agent("a").loss_per_mille = 150;
    for (int i = 0; i < 5; ++i) {
      world.UpdateAll("engine", Selector::kLatest, 2s);
      world.executor.Advance(3s);
      EXPECT_EQ(world.core->counts().sessions, 0U);
    }
    world.agent("b").loss_per_mille = 0;
    world.agent("a").loss_per_mille = 0;
    world.executor.Advance(5s);
    world.UpdateAll("engine", Selector::kLatest, 10s);
    world.executor.Advance(10s);
    for (const Worker* worker : world.WorkersOf("engine")) {
      ASSERT_TRUE(worker->updated);
      EXPECT_OK(*worker->updated);
      EXPECT_EQ(worker->live, 1U);
    }
    world.ExpectQuiet();
  }
}

// ---- dirty replicas -----------------------------------------------------------------------------

TEST_F(SessionSim, RepairsADirtyReplicaWithTheSameVersion) {
  StartInPlaceAtSevenOfEight();
  world_.agent("b").corrupt_target = 0;
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_FALSE(Failure().ok());
  EXPECT_EQ(ReplicaOf(0).state(), "dirty");
  world_.agent("b").corrupt_target.reset();
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(8);
  EXPECT_EQ(ReplicaOf(0).state(), "idle");
}

TEST_F(SessionSim, AReplicaIsNotDirtyWhenItsAgentSaysThatNoByteWasWritten) {
  StartInPlaceAtSevenOfEight();
  // The plan is known, so that this session moves from the start; its source fails at once.
  world_.agent("a").fail_prepare = Status(Code::kFailedPrecondition, "the source wrote");
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_FALSE(Failure().ok());
  EXPECT_EQ(ReplicaOf(0).state(), "idle");
  EXPECT_EQ(ReplicaOf(0).live_version(), 7U);
  // Nobody says so: unknown is dirty.
  world_.agent("b").mute.insert(Received::kAbort);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_FALSE(Failure().ok());
  EXPECT_EQ(ReplicaOf(0).state(), "dirty");
}

TEST_F(SessionSim, AReplicaIsDirtyWhenBytesWereWrittenBeforeASourceFailed) {
  StartInPlace();
  world_.PublishAll("trainer", 7);
  world_.agent("a").corrupt_source = 0;  // found out when the bytes have moved
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_FALSE(Failure().ok());
  EXPECT_EQ(ReplicaOf(0).state(), "dirty");
}

TEST_F(SessionSim, AReplicaOfWhichSomeRanksMayHaveFlippedIsDirty) {
  Start();
  world_.agent("b").mute = {Received::kFlipCommit, Received::kAbort};
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 5s);
  world_.executor.Advance(6s);
  ASSERT_EQ(world_.core->counts().sessions, 0U);
  EXPECT_EQ(ReplicaOf(0).state(), "dirty") << "also with the shadow flip";
}

TEST_F(SessionSim, ASessionThatCannotHaveWrittenServedMemoryLeavesNoDoubt) {
  for (const FlipMode flip : {FlipMode::kInPlace, FlipMode::kShadow}) {
    SCOPED_TRACE(static_cast<int>(flip));
    World::JobOptions engine;
    engine.flip = flip;
    World world;
    world.AddAgent("a");
    world.AddAgent("b");
    world.StartJob("trainer", Role::kProducer, 1, {"a"}, engine);
    world.StartJob("engine", Role::kConsumer, 1, {"b"}, engine);
    // Nobody says what was left: in place it never began, with a shadow it wrote that only.
    world.agent("b").mute = {
        Received::kAbort, flip == FlipMode::kInPlace ? Received::kPrepare : Received::kFlipPrepare};
    world.PublishAll("trainer", 7);
    world.UpdateAll("engine", Selector::kLatest, 5s);
    ASSERT_EQ(world.core->counts().sessions, 1U);
    world.executor.Advance(6s);
    ASSERT_EQ(world.core->counts().sessions, 0U);
    world.core->GetStatus({}, [&](Result<proto::StatusReply> reply) {
      EXPECT_EQ(reply->channels(0).replicas(0).state(), "idle");
    });
  }
}

TEST_F(SessionSim, BelievesTheAgentAtWhichASessionFailed) {
  StartInPlace();
  world_.agent("b").mute = {Received::kGo, Received::kAbort};
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.executor.Advance(1s);
  proto::AgentMessage message;
  message.mutable_session_failed()->set_session(1);
  message.mutable_session_failed()->add_dirty_target_ranks(1);
  world_.agent("b").Say(std::move(message));
  world_.executor.RunReady();
  ASSERT_EQ(world_.core->counts().sessions, 0U);
  const proto::ReplicaStatus replica = ReplicaOf(0);
  EXPECT_FALSE(replica.ranks(0).dirty());
  EXPECT_TRUE(replica.ranks(1).dirty());
  EXPECT_FALSE(replica.ranks(2).dirty());
}

TEST_F(SessionSim, AnAnswerAboutAnotherSessionEndsNoDoubt) {
  StartInPlace();
  world_.agent("b").mute.insert(Received::kAbort);
  world_.agent("a").corrupt_source = 0;
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.executor.Advance(1s);
  ASSERT_EQ(ReplicaOf(0).state(), "dirty");
  const auto nothing_left = [&](std::uint64_t session) {
    proto::AgentMessage message;
    message.mutable_session_failed()->set_session(session);
    world_.agent("b").Say(std::move(message));
    world_.executor.RunReady();
  };
  nothing_left(4);
  EXPECT_EQ(ReplicaOf(0).state(), "dirty");
  nothing_left(1);
  EXPECT_EQ(ReplicaOf(0).state(), "idle");
}

TEST_F(SessionSim, BringsADirtyReplicaEvenWhatItServed) {
  World::JobOptions engine;
  engine.flip = FlipMode::kInPlace;
  engine.live_version = 7;
  engine.dirty = true;
  Start(engine);
  world_.PublishAll("trainer", 8);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(8);
}

// An agent that died while it wrote: its rank comes back through the next one and says so.
TEST_F(SessionSim, ARankThatComesBackDirtyMakesItsReplicaDirtyUntilItIsRepaired) {
  for (const FlipMode flip : {FlipMode::kInPlace, FlipMode::kShadow}) {
    SCOPED_TRACE(static_cast<int>(flip));
    World::JobOptions engine;
    engine.flip = flip;
    World world;
    const auto replica = [&world] {
      proto::ReplicaStatus out;
      world.core->GetStatus(
          {}, [&](Result<proto::StatusReply> reply) { out = reply->channels(0).replicas(0); });
      return out;
    };
    world.AddAgent("a");
    world.AddAgent("b");
    world.StartJob("trainer", Role::kProducer, 1, {"a"}, engine);
    world.StartJob("engine", Role::kConsumer, 2, {"a", "b"}, engine);
    world.PublishAll("trainer", 7);
    world.UpdateAll("engine", Selector::kLatest, 10s);
    world.executor.Advance(1s);
    ASSERT_EQ(replica().live_version(), 7U);
    world.Leave(world.worker("engine", 1));
    engine.live_version = 7;  // whatever it says it serves
    engine.dirty = true;
    ASSERT_OK(*world.Register("b", "engine", Role::kConsumer, 1, 2, engine).registered);
    EXPECT_EQ(replica().state(), "dirty");
    EXPECT_FALSE(replica().ranks(0).dirty());
    EXPECT_TRUE(replica().ranks(1).dirty());
    EXPECT_EQ(world.Verify(7).value().holder_count(), 1U) << "the trainer only";
    // What it serves already is not what this replica has.
    world.UpdateAll("engine", Selector::kPinned, 10s, 7);
    world.executor.Advance(1s);
    for (Worker* worker : world.WorkersOf("engine")) {
      ASSERT_TRUE(worker->updated);
      EXPECT_OK(*worker->updated);
      EXPECT_EQ(worker->live, 7U);
    }
    EXPECT_EQ(world.agent("b").received[Received::kPrepare], 2) << "brought";
    EXPECT_EQ(replica().state(), "idle");
    EXPECT_EQ(replica().live_version(), 7U);
    world.ExpectQuiet();
  }
}

TEST_F(SessionSim, LeavesAShadowReplicaCleanAfterAFailure) {
  Start();
  world_.agent("b").corrupt_target = 0;
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  EXPECT_FALSE(Failure().ok());
  EXPECT_EQ(ReplicaOf(0).state(), "idle");
}

TEST_F(SessionSim, ALateAnswerToOneSessionCleansNothingOfTheNext) {
  StartInPlaceAtSevenOfEight();
  world_.agent("a").fail_prepare = Status(Code::kFailedPrecondition, "the source wrote");
  world_.agent("b").mute.insert(Received::kAbort);
  for (int i = 0; i < 2; ++i) {
    world_.UpdateAll("engine", Selector::kLatest, 10s);
    world_.executor.Advance(1s);
    ASSERT_EQ(world_.core->counts().sessions, 0U);
  }
  for (const std::uint64_t session : {2U, 3U}) {
    proto::AgentMessage message;
    message.mutable_session_failed()->set_session(session);
    for (std::uint32_t rank = 0; session == 3 && rank < 3; ++rank) {
      message.mutable_session_failed()->add_dirty_target_ranks(rank);
    }
    world_.agent("b").Say(std::move(message));
    world_.executor.RunReady();
    EXPECT_EQ(ReplicaOf(0).state(), "dirty") << session;
  }
}

}  // namespace
}  // namespace tensorbus::sim
