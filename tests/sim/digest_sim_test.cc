#include <gtest/gtest.h>

#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using daemon::SlowConsumer;
using ::testing::HasSubstr;
using testing::IsStatus;

class DigestSim : public ::testing::Test {
 protected:
  void Start() {
    world_.AddAgent("a");
    world_.AddAgent("b");
    world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world_.StartJob("engine", Role::kConsumer, 3, {"b", "a"}, {});
    world_.PublishAll("trainer", 7);
  }
  void Sync() {
    world_.UpdateAll("engine", Selector::kLatest, 10s);
    world_.executor.Advance(1s);
  }

  World world_;
};

TEST_F(DigestSim, FindsProducerAndReplicasEqual) {
  Start();
  Sync();
  ASSERT_OK_AND_ASSIGN(const proto::VerifyReply reply, world_.Verify());
  EXPECT_TRUE(reply.equal());
  EXPECT_EQ(reply.version(), 7U);
  EXPECT_EQ(reply.holder_count(), 5U);
  EXPECT_EQ(reply.tensor_count(), 2U);
  EXPECT_EQ(reply.tensors_size(), 2);
}

TEST_F(DigestSim, NamesTheRankThatHoldsSomethingElse) {
  Start();
  Sync();
  world_.worker("engine", 1).content = 6;
  ASSERT_OK_AND_ASSIGN(const proto::VerifyReply reply, world_.Verify());
  EXPECT_FALSE(reply.equal());
  ASSERT_GT(reply.faults_size(), 0);
  for (const auto& fault : reply.faults()) {
    EXPECT_EQ(fault.holder(), "policy/engine replica 0 rank 1 of 3");
    EXPECT_THAT(fault.against(), HasSubstr("policy/trainer rank"));
  }
}

TEST_F(DigestSim, ADirtyReplicaIsNoWitness) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  World::JobOptions dirty;
  dirty.flip = FlipMode::kInPlace;
  dirty.live_version = 6;
  dirty.dirty = true;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, dirty);
  EXPECT_EQ(world_.Verify(6).status().code(), Code::kNotFound) << "nobody holds it";
  world_.StartJob("other", Role::kConsumer, 1, {"b"}, {});
  Worker& worker = world_.worker("other", 0);
  worker.content = 6;
  for (Worker* witness : world_.WorkersOf("engine")) witness->content = 6;
  world_.Claim(worker);
  world_.executor.Advance(1s);
  EXPECT_EQ(worker.claimed.value().code(), Code::kNotFound);
}

TEST_F(DigestSim, ComparesReplicasWithEachOtherWhenTheTrainerHasWrittenOn) {
  Start();
  Sync();
  world_.Release(world_.worker("trainer", 0), 7, 1s);
  ASSERT_OK_AND_ASSIGN(const proto::VerifyReply reply, world_.Verify());
  EXPECT_EQ(reply.holder_count(), 3U);
}

TEST_F(DigestSim, NamesWhoDoesNotAnswerInTime) {
  Start();
  Sync();
  world_.agent("b").mute.insert(Received::kQuery);
  const auto reply = world_.Verify(7, 1000);
  EXPECT_THAT(reply, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(reply.status().message(), HasSubstr("policy/engine replica 0 rank 0 of 3"));
  EXPECT_EQ(world_.core->counts().queries, 0U);
}

TEST_F(DigestSim, SaysWhenNobodyHoldsAVersion) {
  Start();
  EXPECT_EQ(world_.Verify(3).status().code(), Code::kNotFound);
}

TEST_F(DigestSim, EndsQuestionsToAnAgentThatDies) {
  Start();
  Sync();
  world_.agent("b").die_on = Received::kQuery;
  EXPECT_THAT(world_.Verify(7), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(DigestSim, BelievesAnswersOfTheAgentThatWasAskedOnly) {
  Start();
  Sync();
  world_.agent("b").mute.insert(Received::kQuery);
  proto::VerifyRequest request;
  request.set_timeout_ms(2000);
  std::optional<Result<proto::VerifyReply>> reply;
  const auto answer_all = [&](const char* agent) {
    for (std::uint64_t query = 1; query <= 20; ++query) {
      proto::AgentMessage message;
      message.mutable_answer()->set_query(query);
      world_.agent(agent).Say(std::move(message));
    }
    world_.executor.RunReady();
  };
  world_.core->Verify(request, [&](Result<proto::VerifyReply> got) { reply = std::move(got); });
  world_.executor.RunReady();
  ASSERT_GT(world_.core->counts().queries, 0U);
  answer_all("a");
  EXPECT_FALSE(reply);
  answer_all("b");  // with fewer digests than boxes
  ASSERT_TRUE(reply);
  EXPECT_THAT(*reply, IsStatus(Code::kInternal, Reason::kMalformed));
}

TEST_F(DigestSim, AReplicaThatIsBeingWrittenIsNoWitness) {
  Start();
  Sync();
  world_.PublishAll("trainer", 8);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  EXPECT_EQ(world_.Verify(7).status().code(), Code::kNotFound);
}

TEST_F(DigestSim, NoReplicaIsItsOwnWitness) {
  World::JobOptions serves;
  serves.live_version = 6;
  world_.AddAgent("a");
  world_.AddAgent("b");
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, serves);
  Worker& worker = world_.worker("engine", 0);
  worker.content = 5;
  world_.Claim(worker);
  world_.executor.Advance(1s);
  EXPECT_EQ(worker.claimed.value().code(), Code::kNotFound);
}

TEST_F(DigestSim, NoClaimIsProvedByWhatWasReplacedMeanwhile) {
  Start();
  world_.side_work.duration = 1s;
  Worker& worker = world_.worker("engine", 0);
  worker.content = 7;
  world_.Claim(worker);
  world_.executor.Advance(1500ms);
  world_.Publish(world_.worker("trainer", 0), 8);
  world_.worker("trainer", 0).content = 7;  // its memory is still to be overwritten
  world_.executor.Advance(10s);
  ASSERT_TRUE(worker.claimed);
  EXPECT_EQ(worker.claimed->code(), Code::kNotFound);
}

TEST_F(DigestSim, NothingIsVerifiedThatWasReplacedMeanwhile) {
  Start();
  world_.side_work.duration = 1s;
  proto::VerifyRequest request;
  std::optional<Result<proto::VerifyReply>> reply;
  world_.core->Verify(request, [&](Result<proto::VerifyReply> got) { reply = std::move(got); });
  world_.executor.Advance(500ms);
  world_.PublishAll("trainer", 8);
  world_.executor.Advance(10s);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status().code(), Code::kAborted);
}

TEST_F(DigestSim, AClaimSaysNothingOfAProcessThatCameAfterIt) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, {});
  world_.PublishAll("trainer", 7);
  world_.side_work.duration = 1s;
  Worker& worker = world_.worker("engine", 0);
  worker.content = 7;
  world_.Claim(worker);
  world_.Leave(worker);
  world_.side_work.duration = {};
  ASSERT_OK(world_.Register("a", "engine", Role::kConsumer, 0, 1, {}).registered.value());
  world_.executor.Advance(10s);
  world_.core->GetStatus({}, [&](Result<proto::StatusReply> reply) {
    EXPECT_EQ(reply->channels(0).replicas(0).live_version(), 0U);
  });
}

TEST_F(DigestSim, AClaimSaysNothingOfMemoryThatIsWrittenMeanwhile) {
  Start();
  Sync();
  Worker& worker = world_.worker("engine", 0);
  const auto live = [this] {
    std::uint64_t out = 0;
    world_.core->GetStatus({}, [&](Result<proto::StatusReply> reply) {
      out = reply->channels(0).replicas(0).live_version();
    });
    return out;
  };
  for (const bool proved : {true, false}) {
    const std::uint64_t next = live() + 1;
    world_.PublishAll("trainer", next);
    world_.Update(worker, Selector::kLatest, 10s);
    worker.content = proved ? next : 5;
    world_.side_work.duration = 1s;
    world_.Claim(worker);
    for (const std::uint32_t rank : {1U, 2U}) {
      world_.Update(world_.worker("engine", rank), Selector::kLatest, 10s);
    }
    ASSERT_EQ(world_.core->counts().sessions, 1U);
    world_.executor.Advance(10s);
    ASSERT_TRUE(worker.claimed);
    EXPECT_THAT(*worker.claimed, IsStatus(Code::kAborted, Reason::kBusy));
    EXPECT_EQ(live(), next);
  }
  world_.PublishAll("trainer", live() + 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  world_.Claim(worker);
  ASSERT_TRUE(worker.claimed);
  EXPECT_THAT(*worker.claimed, IsStatus(Code::kAborted, Reason::kBusy));
}

TEST_F(DigestSim, LetsAnEngineProveWhichVersionItLoaded) {
  Start();
  for (Worker* worker : world_.WorkersOf("engine")) {
    worker->content = 7;
    world_.Claim(*worker);
    world_.executor.Advance(1s);
    ASSERT_TRUE(worker->claimed);
    EXPECT_OK(*worker->claimed);
    EXPECT_EQ(worker->claimed_version, 7U);
    worker->live = 7;
  }
  Sync();
  EXPECT_OK(world_.worker("engine", 0).updated.value());
  EXPECT_EQ(world_.agent("b").received[Received::kPrepare], 0) << "it serves the latest already";
}

TEST_F(DigestSim, BelievesNoEngineThatHoldsSomethingElse) {
  Start();
  Worker& worker = world_.worker("engine", 0);
  worker.content = 5;
  world_.Claim(worker);
  world_.executor.Advance(1s);
  ASSERT_TRUE(worker.claimed);
  EXPECT_EQ(worker.claimed->code(), Code::kNotFound);
}

// Tied weights: both places are bytes that the engine serves from.
TEST_F(DigestSim, BelievesNoEngineOfWhichTwoPlacesDiffer) {
  Start();
  Worker& worker = world_.worker("engine", 0);
  worker.content = 7;
  world_.Claim(worker, 6);
  world_.executor.Advance(1s);
  ASSERT_TRUE(worker.claimed);
  EXPECT_THAT(*worker.claimed, IsStatus(Code::kNotFound, Reason::kChecksumMismatch));
  EXPECT_THAT(worker.claimed->message(), HasSubstr("in two places that differ"));
}

TEST_F(DigestSim, AClaimThatIsProvedCleansADirtyRank) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  World::JobOptions dirty;
  dirty.dirty = true;
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 2, {"b"}, dirty);
  world_.PublishAll("trainer", 7);
  const auto state = [this] {
    std::string out;
    world_.core->GetStatus({}, [&](Result<proto::StatusReply> reply) {
      out = reply->channels(0).replicas(0).state();
    });
    return out;
  };
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    Worker& worker = world_.worker("engine", rank);
    worker.content = 5;  // a mixture equals nothing
    world_.Claim(worker);
    world_.executor.Advance(1s);
    EXPECT_FALSE(worker.claimed->ok());
    EXPECT_EQ(state(), "dirty");
    worker.content = 7;
    world_.Claim(worker);
    world_.executor.Advance(1s);
    EXPECT_OK(*worker.claimed);
    EXPECT_EQ(state(), rank == 0 ? "dirty" : "idle") << "one dirty rank is enough";
  }
}

TEST_F(DigestSim, SnapshotsTakePartAlthoughTheTrainerHasWrittenOn) {
  Start();
  world_.PublishAll("trainer", 8, SlowConsumer::kSnapshot, 1, 4);
  for (Worker* worker : world_.WorkersOf("trainer")) worker->content = 99;
  Worker& worker = world_.worker("engine", 0);
  worker.content = 8;
  world_.Claim(worker);
  world_.executor.Advance(1s);
  ASSERT_TRUE(worker.claimed);
  EXPECT_OK(*worker.claimed);
  EXPECT_EQ(worker.claimed_version, 8U);
  Sync();
  ASSERT_OK_AND_ASSIGN(proto::VerifyReply reply, world_.Verify(8));
  EXPECT_EQ(reply.holder_count(), 5U);
  EXPECT_TRUE(reply.equal());
  world_.worker("trainer", 1).snapshots.clear();
  EXPECT_EQ(world_.Verify(8).status().code(), Code::kNotFound);
}

TEST_F(DigestSim, AClaimThatIsComparedWhileItsRankLeavesIsForgotten) {
  Start();
  world_.side_work.duration = 1s;
  Worker& worker = world_.worker("engine", 0);
  worker.content = 7;
  world_.Claim(worker);
  world_.Leave(worker);
  world_.executor.Advance(10s);
  EXPECT_EQ(world_.core->counts().queries, 0U);
  EXPECT_EQ(world_.core->counts().ranks, 4U);
}

TEST_F(DigestSim, AnEngineThatHoldsSomethingElseIsBroughtTheVersionItWasThoughtToServe) {
  Start();
  Sync();
  for (Worker* worker : world_.WorkersOf("engine")) {
    worker->content = 5;
    world_.Claim(*worker);
    world_.executor.Advance(1s);
    EXPECT_EQ(worker->claimed->code(), Code::kNotFound);
    EXPECT_EQ(worker->claimed->reason(), Reason::kChecksumMismatch);
  }
  const std::size_t before = world_.agent("b").received[Received::kPrepare];
  Sync();
  EXPECT_GT(world_.agent("b").received[Received::kPrepare], before) << "brought nothing";
}

TEST_F(DigestSim, AClaimSaysNothingOfWhatIsRegisteredSince) {
  Start();
  for (Worker* worker : world_.WorkersOf("engine")) worker->content = 7;
  world_.side_work.duration = 1s;
  for (Worker* worker : world_.WorkersOf("engine")) {
    const RankIdentity identity = worker->identity;
    const std::string agent = worker->agent;
    world_.Claim(*worker);
    world_.Leave(*worker);
    world_.Register(agent, identity.job, identity.role, identity.rank, identity.rank_count, {});
  }
  world_.executor.Advance(10s);
  Sync();
  EXPECT_GT(world_.agent("b").received[Received::kPrepare], 0) << "nobody knows what they hold";
}

TEST_F(DigestSim, ExplainsWhoGetsATensorFromWhom) {
  Start();
  proto::ExplainRequest request;
  request.set_tensor("w");
  Result<proto::ExplainReply> reply = Status(Code::kUnknown, "");
  world_.core->Explain(request, [&](Result<proto::ExplainReply> got) { reply = std::move(got); });
  world_.executor.RunReady();
  ASSERT_OK(reply);
  EXPECT_EQ(reply->holders_size(), 5);
  std::uint64_t bytes = 0;
  for (const auto& route : reply->routes()) bytes += route.bytes();
  EXPECT_EQ(bytes, World::kElements * 4);
  request.set_tensor("v");
  world_.core->Explain(request, [&](Result<proto::ExplainReply> got) { reply = std::move(got); });
  world_.executor.RunReady();
  EXPECT_THAT(reply, IsStatus(Code::kNotFound, Reason::kUnknownTensor));
}

TEST_F(DigestSim, SaysWhoIsMissing) {
  Start();
  world_.Update(world_.worker("engine", 0), Selector::kNext, 30s);
  world_.executor.Advance(2s);
  proto::WhoIsMissingReply reply;
  world_.core->WhoIsMissing({}, [&](Result<proto::WhoIsMissingReply> got) { reply = got.value(); });
  ASSERT_EQ(reply.missing_size(), 2);
  EXPECT_THAT(reply.missing(0).who(), HasSubstr("policy/engine replica 0 rank 1 of 3"));
  EXPECT_DOUBLE_EQ(reply.missing(0).waiting_seconds(), 2.0);
}

}  // namespace
}  // namespace tensorbus::sim
