#include "agent/agent.h"

#include <filesystem>
#include <fmt/format.h>
#include <future>
#include <gtest/gtest.h>
#include <thread>

#include "tensorbus/rpc/status_map.h"
#include "tensorbus/transport/shm_transport.h"
#include "tests/testing/deadline.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/agent/agent_fixture.h"

// One agent, a daemon and workers that are fakes, real memory and the real shm transport: sessions
// from start to end, and what a worker may ask outside of them.
namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using testing::FakeDaemon;
using testing::FakeWorker;
using testing::IsStatus;
using wire::MessageType;

TEST_F(AgentFixture, BringsAVersionFromTwoRowShardsToTwoColumnShards) {
  StartPair(FlipMode::kInPlace);
  for (std::uint32_t version = 1; version <= 3; ++version) {
    PublishAll(version);
    const auto updated = UpdateAll();
    for (std::size_t i = 0; i < updated.size(); ++i) {
      ASSERT_OK(updated[i].status);
      EXPECT_EQ(updated[i].version, Version{version});
      EXPECT_EQ(updated[i].bytes, 64U * 24 * 4 / 2);
      EXPECT_EQ(updated[i].digest.bytes, updated[i].bytes);
      EXPECT_EQ(targets[i]->CountWrong(version), 0U);
      EXPECT_EQ(targets[i]->page().live_version.load(), version);
    }
  }
  EXPECT_EQ(targets[0]->hooks(),
            (std::vector{MessageType::kFence, MessageType::kLive, MessageType::kFence,
                         MessageType::kLive, MessageType::kFence, MessageType::kLive}));
}

TEST_F(AgentFixture, ShadowTouchesLiveMemoryAtTheCommitOnly) {
  StartPair(FlipMode::kShadow);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  Hold(FakeDaemon::Step::kFlipCommit);
  PublishAll(2);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kFlipReady, 4));
  EXPECT_EQ(targets[0]->CountWrong(1), 0U) << "the old version, bit for bit";
  ReleaseHeld();
  for (const auto& updated : AwaitAll(requests)) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
  EXPECT_EQ(targets[1]->CountWrong(2), 0U);
  EXPECT_EQ(targets[0]->hooks(), (std::vector{MessageType::kFlipBegin, MessageType::kLive,
                                              MessageType::kFlipBegin, MessageType::kLive}));
}

TEST_F(AgentFixture, EveryProofLevelMovesTheRightBytes) {
  for (const Proof proof : {Proof::kOff, Proof::kStream, Proof::kReadback, Proof::kMemory}) {
    SCOPED_TRACE(static_cast<int>(proof));
    Restart();
    StartPair(FlipMode::kInPlace, proof);
    for (std::uint32_t version = 1; version <= 2; ++version) {
      PublishAll(version);
      for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
      EXPECT_EQ(targets[0]->CountWrong(version), 0U);
      EXPECT_EQ(targets[1]->CountWrong(version), 0U);
    }
  }
}

TEST_F(AgentFixture, EarlyGoNeedsNoSecondMessage) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  daemon.set_early_go(true);
  Hold(FakeDaemon::Step::kGo);  // never sent: the agents must start by themselves
  PublishAll(2);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[1]->CountWrong(2), 0U);
}

TEST_F(AgentFixture, RefusesWorkersOfNamesThatNobodyCouldRead) {
  for (const char* name : {"", "\x1b[2J", "a\xc2\x9bK", "a\xff"}) {
    for (const bool job : {false, true}) {
      FakeWorker worker(agent->socket_path(), {.channel = job ? "policy" : name,
                                               .job = job ? name : "trainer",
                                               .role = Role::kProducer,
                                               .replica = 0,
                                               .rank = 0,
                                               .rank_count = 1});
      const Status status = worker.Connect();
      EXPECT_THAT(status, IsStatus(Code::kInvalidArgument, Reason::kMalformed)) << name;
      EXPECT_NE(status.message().find(job ? "the job's name" : "the channel's name"),
                std::string::npos);
    }
  }
}

TEST_F(AgentFixture, WritesEveryAliasOfATiedWeight) {
  AddSource(0, 1, Rows(0, 64));
  auto& target = AddTarget(0, 1, Rows(0, 64));
  target.AddAlias();
  ConnectAll(FlipMode::kInPlace, Proof::kMemory);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  EXPECT_EQ(targets[0]->CountWrong(1), 0U) << "both places";
}

TEST_F(AgentFixture, APieceMayBeRegisteredTwice) {
  AddSource(0, 1, Rows(0, 64));
  auto& target = AddTarget(0, 1, Rows(0, 64));
  target.registration.pieces.push_back(target.registration.pieces[0]);
  ConnectAll(FlipMode::kInPlace, Proof::kMemory);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, WriteBetweenPublishAndReleaseIsRefusedByTheCounter) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  Hold(FakeDaemon::Step::kFinish);
  PublishAll(2);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReceipt, 4));
  sources[1]->BumpWriteCount();
  ReleaseHeld();
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
    EXPECT_NE(updated.status.message().find("rank 1 of 2 wrote"), std::string::npos)
        << updated.status;
    EXPECT_EQ(updated.version, Version{1});
  }
  const auto failed = daemon.Received(proto::AgentMessage::kSessionFailed);
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0].session_failed().error().reason(),
            static_cast<std::uint32_t>(Reason::kWriteDuringPublish));
  EXPECT_EQ(failed[0].session_failed().dirty_target_ranks_size(), 2);
}

// By a daemon that lets that pass: the counter is compared with the newer publish then.
TEST_F(AgentFixture, ASourceThatPublishedAnewMeanwhileSaysWhatItHolds) {
  StartPair(FlipMode::kShadow);
  Hold(FakeDaemon::Step::kFinish);
  PublishAll(1);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReceipt, 2));
  sources[0]->BumpWriteCount();
  ASSERT_OK(sources[0]->Publish(2));
  ReleaseHeld();
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  }
  for (const auto& done : daemon.Received(proto::AgentMessage::kSourceDone)) {
    EXPECT_EQ(done.source_done().version(), done.source_done().source_rank() == 0 ? 2U : 1U);
  }
}

TEST_F(AgentFixture, WriteBeforeTheFirstByteIsRefusedAndNothingIsDirty) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  sources[0]->BumpWriteCount();
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  }
}

TEST_F(AgentFixture, ReceiptsCatchAWriterThatBypassesTheCounter) {
  StartPair(FlipMode::kShadow);
  PublishAll(1, wire::SlowConsumer::kWait, /*receipts=*/true);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  PublishAll(2, wire::SlowConsumer::kWait, /*receipts=*/true);
  sources[0]->At(0, 5) += 1;
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
    EXPECT_NE(updated.status.message().find("w"), std::string::npos);
    EXPECT_EQ(updated.version, Version{1});
  }
  EXPECT_EQ(targets[0]->CountWrong(1), 0U) << "still the old version";
}

TEST_F(AgentFixture, ReceiptsOfTheFirstPublishAreCheckedThroughThePieces) {
  StartPair(FlipMode::kShadow, Proof::kStream);
  PublishAll(1, wire::SlowConsumer::kWait, /*receipts=*/true);
  sources[1]->At(0, 0) += 1;
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  }
}

TEST_F(AgentFixture, AbortAfterTheFirstByteLeavesInPlaceDirtyUntilRepaired) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kFinish);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReceipt, 2));
  daemon.Abort(SessionId{1}, Status(Code::kUnavailable, "somebody left", Reason::kPeerLost));
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  }
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionFailed, 1));
  daemon.SetOnStep(nullptr);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, AbortBeforeTheFirstByteIsAnsweredWithNothingDirty) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kGo);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReady, 1));
  daemon.Abort(SessionId{1}, Status(Code::kUnavailable, "somebody left", Reason::kPeerLost));
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  }
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionFailed, 1));
  const auto failed = daemon.Received(proto::AgentMessage::kSessionFailed);
  EXPECT_EQ(failed[0].session_failed().dirty_target_ranks_size(), 0);
}

TEST_F(AgentFixture, AbortBeforeTheCommitLeavesShadowAsItWas) {
  StartPair(FlipMode::kShadow);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  Hold(FakeDaemon::Step::kFlipCommit);
  PublishAll(2);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kFlipReady, 4));
  daemon.Abort(SessionId{2}, Status(Code::kUnavailable, "somebody left", Reason::kPeerLost));
  for (const auto& updated : AwaitAll(requests)) {
    EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
    EXPECT_EQ(updated.version, Version{1});
  }
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
  EXPECT_EQ(targets[1]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, AHookThatFailsFailsTheSessionAndNamesTheRank) {
  StartPair(FlipMode::kInPlace);
  targets[1]->SetHook([](MessageType type) {
    return type == MessageType::kFence ? Status(Code::kInternal, "engine is stuck") : Status();
  });
  PublishAll(1);
  for (const auto& updated : UpdateAll()) {
    EXPECT_NE(updated.status.message().find("fence hook of policy/engine replica 0 rank 1 of 2"),
              std::string::npos)
        << updated.status;
  }
}

TEST_F(AgentFixture, ATargetThatDiesMidSessionFailsItForTheOther) {
  StartPair(FlipMode::kShadow);
  PublishAll(1);
  ASSERT_OK(UpdateAll()[0].status);
  Hold(FakeDaemon::Step::kFlipPrepare);
  PublishAll(2);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSourceDone, 4));
  targets[1]->Disconnect();
  const auto updated = targets[0]->AwaitUpdate(requests[0]);
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_NE(updated.status.message().find("rank 1"), std::string::npos) << updated.status;
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, SnapshotGivesTheMemoryBackAtOnce) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1, wire::SlowConsumer::kSnapshot);
  EXPECT_EQ(sources[0]->page().released_version.load(), 1U);
  EXPECT_OK(sources[0]->Release(1).status);
  daemon.set_from_snapshot(true);
  for (auto& source : sources) {
    source->BumpWriteCount();
    source->Fill(99);  // the optimizer goes on
  }
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
  EXPECT_EQ(targets[1]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, PublishRefusesWhatIsNotNewer) {
  StartPair(FlipMode::kInPlace);
  PublishAll(5);
  EXPECT_THAT(sources[0]->Publish(5), IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(sources[0]->Publish(4), IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(targets[0]->Publish(6), IsStatus(Code::kFailedPrecondition, Reason::kNone));
}

TEST_F(AgentFixture, ComesBackToADaemonThatCrashed) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  daemon.Crash(/*accept_again=*/true);
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRegisterRank, 8));
  const auto registered = daemon.Received(proto::AgentMessage::kRegisterRank);
  for (std::size_t i = 4; i < 8; ++i) {
    EXPECT_EQ(registered[i].register_rank().known_epoch(), 1U);
    EXPECT_EQ(registered[i].register_rank().live_version(), 1U);
  }
  PublishAll(2);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
}

TEST_F(AgentFixture, ForgetsAnEpochThatCannotBe) {
  StartPair(FlipMode::kInPlace);
  daemon.set_epoch(~std::uint64_t{0});
  PublishAll(1);
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  }
  daemon.set_epoch(5);
  PublishAll(2);
  for (const auto& updated : UpdateAll()) EXPECT_OK(updated.status);
}

TEST_F(AgentFixture, RefusesASessionOfAnOlderEpochThanItHasSeen) {
  StartPair(FlipMode::kInPlace);
  daemon.set_epoch(5);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  daemon.set_epoch(4);
  PublishAll(2);
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
    EXPECT_THAT(updated.status.message(), ::testing::HasSubstr("policy"));
    EXPECT_THAT(updated.status.message(), ::testing::HasSubstr("epoch 4"));
    EXPECT_THAT(updated.status.message(), ::testing::HasSubstr("epoch 5"));
  }
  EXPECT_EQ(targets[0]->CountWrong(1), 0U) << "a byte of the refused version came";
  daemon.set_epoch(5);
  PublishAll(3);
  for (const auto& updated : UpdateAll()) EXPECT_OK(updated.status);
}

TEST_F(AgentFixture, TellsADaemonWithoutMemoryWhichEpochItHasSeen) {
  StartPair(FlipMode::kInPlace);
  daemon.set_epoch(5);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  daemon.Crash(/*accept_again=*/true);
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRegisterRank, 8));
  const auto registered = daemon.Received(proto::AgentMessage::kRegisterRank);
  for (std::size_t i = 0; i < 8; ++i) {
    const std::uint64_t seen = i < 4 ? 0 : 5;
    EXPECT_EQ(registered[i].register_rank().seen_epoch(), seen) << i;
    EXPECT_EQ(registered[i].register_rank().known_epoch(), seen) << i;
  }
}

TEST(ChannelEpochs, KeepTheHighestAndNeverGoBack) {
  agent::ChannelEpochs epochs;
  EXPECT_EQ(epochs.Highest("policy"), ChannelEpoch{});
  EXPECT_OK(epochs.Accept("policy", ChannelEpoch{3}));
  EXPECT_OK(epochs.Accept("policy", ChannelEpoch{3}));
  EXPECT_OK(epochs.Accept("policy", ChannelEpoch{7}));
  const Status older = epochs.Accept("policy", ChannelEpoch{6});
  EXPECT_THAT(older, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(older.message(), ::testing::HasSubstr("channel policy"));
  EXPECT_EQ(epochs.Highest("policy"), ChannelEpoch{7});
  EXPECT_OK(epochs.Accept("reward", ChannelEpoch{1})) << "channels count for themselves";
}

TEST(ChannelEpochs, ForgetTheChannelHeardOfLongestAgo) {
  agent::ChannelEpochs epochs(2);
  EXPECT_OK(epochs.Accept("a", ChannelEpoch{2}));
  EXPECT_OK(epochs.Accept("b", ChannelEpoch{2}));
  EXPECT_OK(epochs.Accept("a", ChannelEpoch{2}));
  EXPECT_OK(epochs.Accept("c", ChannelEpoch{2}));
  EXPECT_EQ(epochs.Highest("a"), ChannelEpoch{2});
  EXPECT_EQ(epochs.Highest("b"), ChannelEpoch{});
  EXPECT_EQ(epochs.Highest("c"), ChannelEpoch{2});
}

/// A worker of another channel at the same agent.
class AgentStranger : public AgentFixture {
 protected:
  void AddStranger(Role role) {
    identity_ = {.channel = "reward",
                 .job = "critic",
                 .role = role,
                 .replica = 0,
                 .rank = 0,
                 .rank_count = 1};
    stranger_ = std::make_unique<FakeWorker>(agent->socket_path(), identity_);
    stranger_->AddTensor("w", WeightShape(), Rows(0, 64));
    ASSERT_OK(stranger_->Connect());
    ASSERT_OK(stranger_->Register());
  }
  ~AgentStranger() override { stranger_.reset(); }

  RankIdentity identity_;
  std::unique_ptr<FakeWorker> stranger_;
};

TEST_F(AgentStranger, SpeaksToTheDaemonInItsOwnNameOnly) {
  AddStranger(Role::kProducer);
  ASSERT_OK(stranger_->Publish(3));
  ASSERT_OK(stranger_->Ask(MessageType::kClaim, {}));
  ASSERT_OK(stranger_->Release(3).status);
  const auto is_own = [this](const proto::Rank& rank) {
    return rank.channel() == identity_.channel && rank.job() == identity_.job;
  };
  const auto published = daemon.Received(proto::AgentMessage::kPublish);
  ASSERT_EQ(published.size(), 1U);
  EXPECT_TRUE(is_own(published[0].publish().rank()));
  const auto claimed = daemon.Received(proto::AgentMessage::kClaimVersion);
  ASSERT_EQ(claimed.size(), 1U);
  EXPECT_TRUE(is_own(claimed[0].claim_version().rank()));
  const auto released = daemon.Received(proto::AgentMessage::kRequestRelease);
  ASSERT_EQ(released.size(), 1U);
  EXPECT_TRUE(is_own(released[0].request_release().rank()));
}

TEST_F(AgentStranger, CannotTakeTheNameOfARankThatIsThere) {
  StartPair(FlipMode::kInPlace);
  AddStranger(Role::kConsumer);
  FakeWorker thief(agent->socket_path(), {.channel = "policy",
                                          .job = "trainer",
                                          .role = Role::kProducer,
                                          .replica = 0,
                                          .rank = 0,
                                          .rank_count = 2});
  thief.AddTensor("w", WeightShape(), Rows(0, 32));
  EXPECT_EQ(thief.Connect().code(), Code::kAlreadyExists);
  // Nor by a second hello on a connection that has a name.
  wire::Hello hello;
  hello.identity = identity_;
  hello.identity.channel = "policy";
  hello.identity.job = "intruder";
  EXPECT_THAT(stranger_->Ask(MessageType::kHello, wire::Encode(hello)),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kLeaveRank, 1));
  PublishAll(1);
  for (const auto& updated : UpdateAll()) EXPECT_OK(updated.status);
}

TEST_F(AgentStranger, HearsWhyItIsBrokenOff) {
  AddStranger(Role::kProducer);
  EXPECT_THAT(stranger_->Ask(MessageType::kPublish, {std::byte{1}}),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(stranger_->broken_off().message(), ::testing::HasSubstr("message type 4"));
}

TEST_F(AgentStranger, CannotAnswerTheHooksOfAnother) {
  StartPair(FlipMode::kInPlace);
  AddStranger(Role::kConsumer);
  std::promise<void> fenced;
  std::promise<void> answer;
  const std::shared_future<void> may_answer = answer.get_future().share();
  targets[0]->SetHook([&, may_answer](MessageType hook) {
    if (hook == MessageType::kFence) {
      fenced.set_value();
      may_answer.wait_for(std::chrono::seconds(20));
    }
    return Status();
  });
  PublishAll(1);
  const auto requests = StartUpdateAll();
  ASSERT_EQ(fenced.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  for (std::uint64_t request = 1; request <= 200; ++request) {
    ASSERT_OK(stranger_->Send(MessageType::kHookDone, request, wire::Encode(wire::HookDone{})));
  }
  ASSERT_OK(stranger_->Ask(MessageType::kPing, {}));  // what came before it is dealt with
  ASSERT_OK(stranger_->Ask(MessageType::kClaim, {}));
  for (const auto& receipt : daemon.Received(proto::AgentMessage::kSessionReceipt)) {
    EXPECT_NE(receipt.session_receipt().target_rank(), 0U) << "moved without its engine's word";
  }
  answer.set_value();
  for (const auto& updated : AwaitAll(requests)) EXPECT_OK(updated.status);
}

TEST_F(AgentFixture, ADaemonLostMidSessionAbortsItAndTheUpdateGoesOnAfterwards) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kFinish);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReceipt, 2));
  daemon.SetOnStep(nullptr);
  daemon.Crash(/*accept_again=*/true);
  for (const auto& updated : AwaitAll(requests)) {
    ASSERT_OK(updated.status);
    EXPECT_EQ(updated.version, Version{1});
  }
  EXPECT_EQ(targets[0]->CountWrong(1), 0U);
}

TEST_F(AgentFixture, AnUpdateThatHasFlippedIsDoneAlthoughItsDaemonDies) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kEnd);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kFlipDone, 2));
  daemon.SetOnStep(nullptr);
  daemon.Crash(/*accept_again=*/true);
  for (const auto& updated : AwaitAll(requests)) {
    ASSERT_OK(updated.status);
    EXPECT_EQ(updated.version, Version{1});
    EXPECT_GT(updated.bytes, 0U) << "asked for anew";
  }
  EXPECT_EQ(daemon.Received(proto::AgentMessage::kFlipDone).size(), 2U);
}

// The same boxes at other addresses: what was bound to the old ones must not be used again, and no
// daemon was there to hear that one rank left and another came.
TEST_F(AgentFixture, MemoryRegisteredAnewWithoutADaemonIsWrittenWhereItIsNow) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  daemon.Crash(/*accept_again=*/false);
  ASSERT_OK(targets[0]->Ask(MessageType::kClaim, {}));  // answered once the daemon is missed
  Registration& moved = targets[0]->registration;
  moved.pieces[0].offset = moved.segment_bytes[0];
  EXPECT_THAT(targets[0]->Register().status(),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  moved.pieces[0].offset = 64;
  moved.segment_bytes[0] += 64;
  daemon.Accept(true);
  ASSERT_OK(targets[0]->Register());
  PublishAll(2);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
  EXPECT_EQ(targets[1]->CountWrong(2), 0U);
}

TEST_F(AgentFixture, WithoutADaemonRequestsFailInTimeNamingIt) {
  StartPair(FlipMode::kInPlace);
  daemon.Crash(/*accept_again=*/false);
  const auto updated = targets[0]->Update(/*timeout_ms=*/50);
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_NE(updated.status.message().find("fake-target"), std::string::npos);
}

TEST_F(AgentFixture, WorkersHearWhyTheDaemonRefusesTheirAgent) {
  StartPair(FlipMode::kInPlace);
  daemon.set_refusal(Status(Code::kAlreadyExists, "the name is taken"));
  daemon.Crash(/*accept_again=*/true);
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kHello, 2));
  const auto refused = [&] {
    return targets[0]->Update(/*timeout_ms=*/50).status.code() == Code::kAlreadyExists;
  };
  const TimePoint deadline = testing::Soon();
  while (!refused() && std::chrono::steady_clock::now() < deadline) {
  }
  const auto updated = targets[0]->Update(/*timeout_ms=*/50);
  EXPECT_THAT(updated.status, IsStatus(Code::kAlreadyExists, Reason::kNone));
  EXPECT_THAT(updated.status.message(),
              ::testing::AllOf(::testing::HasSubstr("fake-target refuses this agent"),
                               ::testing::HasSubstr("the name is taken")));
}

TEST_F(AgentFixture, ADaemonThatIsThereMayTakeLongerOverARegistration) {
  daemon_wait = std::chrono::milliseconds(20);
  Restart();
  daemon.set_register_time(std::chrono::milliseconds(200));
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
}

TEST_F(AgentFixture, ARegistrationTheDaemonNeverAnswersIsGivenUpAndTakenBack) {
  daemon_wait = std::chrono::milliseconds(20);
  register_wait = std::chrono::milliseconds(100);
  Restart();
  daemon.set_register_time(std::chrono::hours(1));
  auto& source = AddSource(0, 1, Rows(0, 64));
  ASSERT_OK(source.Connect());
  EXPECT_THAT(source.Register(), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kLeaveRank, 1));
  daemon.set_register_time({});
  ASSERT_OK(source.Register());
}

TEST_F(AgentFixture, ADaemonThatIsThereMayTakeLongerOverAPublish) {
  daemon_wait = std::chrono::milliseconds(20);
  Restart();
  StartPair(FlipMode::kInPlace);
  daemon.set_publish_time(std::chrono::milliseconds(200));
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
}

// The daemon accepts it after all, and then hears that the rank has gone and come back without it.
TEST_F(AgentFixture, APublishTheDaemonNeverAnswersIsGivenUpAndTakenBack) {
  daemon_wait = std::chrono::milliseconds(20);
  publish_wait = std::chrono::milliseconds(100);
  Restart();
  AddSource(0, 1, Rows(0, 64));
  AddTarget(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kInPlace);
  PublishAll(1);
  daemon.set_publish_time(std::chrono::hours(1));
  EXPECT_THAT(sources[0]->Publish(2), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kLeaveRank, 1));
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRegisterRank, 3));
  const auto registered = daemon.Received(proto::AgentMessage::kRegisterRank);
  EXPECT_EQ(registered.back().register_rank().live_version(), 1U);
  daemon.set_publish_time({});
  PublishAll(2);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
}

TEST_F(AgentFixture, APublishWaitsForADaemonThatRestartsInBetween) {
  StartPair(FlipMode::kInPlace);
  daemon.set_publish_time(std::chrono::hours(1));
  sources[0]->Fill(1);
  sources[1]->Fill(1);
  std::thread publishing([&] { EXPECT_OK(sources[0]->Publish(1)); });
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kPublish, 1));
  daemon.set_publish_time({});
  daemon.Crash(/*accept_again=*/true);
  publishing.join();
  EXPECT_OK(sources[1]->Publish(1));
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
}

TEST_F(AgentFixture, AClaimTheDaemonNeverAnswersEnds) {
  claim_wait = std::chrono::milliseconds(50);
  Restart();
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  daemon.set_answer_claims(false);
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK_AND_ASSIGN(const wire::Frame frame, targets[0]->Ask(MessageType::kClaim, {}));
    ASSERT_OK_AND_ASSIGN(const auto claimed, wire::Decode<wire::Claimed>(frame.body));
    EXPECT_THAT(claimed.status, IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
    // What the daemon may still believe of it is taken back.
    ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kLeaveRank, std::size_t(i) + 1));
  }
}

TEST_F(AgentFixture, MemoryThatASessionWritesIsNotClaimed) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kFinish);
  const auto requests = StartUpdateAll();
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReceipt, 2));
  ASSERT_OK_AND_ASSIGN(const wire::Frame frame, targets[0]->Ask(MessageType::kClaim, {}));
  ASSERT_OK_AND_ASSIGN(const auto claimed, wire::Decode<wire::Claimed>(frame.body));
  EXPECT_THAT(claimed.status, IsStatus(Code::kAborted, Reason::kBusy));
  ReleaseHeld();
  for (const auto& updated : AwaitAll(requests)) ASSERT_OK(updated.status);
}

TEST_F(AgentFixture, AClaimEndsWhenASessionBeginsToWriteWhatItDigests) {
  AddSource(0, 1, Rows(0, 64));
  auto& target = AddTarget(0, 1, Rows(0, 64));
  target.UsePrivateMemory(static_cast<std::uint8_t>(MemoryMode::kBucket));
  ConnectAll(FlipMode::kShadow);
  const std::uint64_t update = target.StartUpdate();
  const std::uint64_t orders = target.bucket_orders();
  target.HoldBuckets(true);
  Result<wire::Frame> frame = Status(Code::kUnknown, "not answered");
  std::thread claiming([&] { frame = target.Ask(MessageType::kClaim, {}); });
  const TimePoint deadline = testing::Soon();
  while (target.bucket_orders() == orders && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  PublishAll(1);
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kSessionReady, 1));
  target.HoldBuckets(false);
  claiming.join();
  ASSERT_OK(frame);
  ASSERT_OK_AND_ASSIGN(const auto claimed, wire::Decode<wire::Claimed>(frame->body));
  EXPECT_THAT(claimed.status, IsStatus(Code::kAborted, Reason::kBusy));
  EXPECT_TRUE(daemon.Received(proto::AgentMessage::kClaimVersion).empty());
  EXPECT_OK(target.AwaitUpdate(update).status);
}

TEST_F(AgentFixture, ARankThatWaitsForAnAnswerIsNotRegisteredAnew) {
  StartPair(FlipMode::kShadow);
  const std::uint64_t request = targets[0]->StartUpdate(/*timeout_ms=*/200);
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRequestVersion, 1));
  EXPECT_THAT(targets[0]->Register(FlipMode::kShadow).status(),
              IsStatus(Code::kFailedPrecondition, Reason::kBusy));
  EXPECT_EQ(targets[0]->AwaitUpdate(request).status.code(), Code::kDeadlineExceeded);
  EXPECT_OK(targets[0]->Register(FlipMode::kShadow));
}

// A worker that changes its place in the job: the same process, the same connection.
TEST_F(AgentFixture, RegistersAnotherLayoutOnTheSameConnection) {
  StartPair(FlipMode::kShadow);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  const std::array<Box, 2> shifted = {Columns(8, 24), Columns(0, 8)};
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i]->registration = {};
    targets[i]->AddTensor("w", WeightShape(), shifted[i]);
    ASSERT_OK(targets[i]->Register(FlipMode::kShadow));
  }
  const auto left = daemon.Received(proto::AgentMessage::kLeaveRank);
  ASSERT_EQ(left.size(), 2U);
  EXPECT_TRUE(left[0].leave_rank().on_purpose());
  const auto known = daemon.Received(proto::AgentMessage::kRegisterRank);
  ASSERT_EQ(known.size(), 6U);
  EXPECT_EQ(known[4].register_rank().live_version(), 0U) << "its new memory holds nothing yet";
  for (const auto& updated : UpdateAll()) {
    ASSERT_OK(updated.status);
    EXPECT_EQ(updated.version, Version{1});
  }
  PublishAll(2);
  const auto updates = UpdateAll();
  for (std::size_t i = 0; i < updates.size(); ++i) {
    ASSERT_OK(updates[i].status);
    EXPECT_EQ(updates[i].bytes, shifted[i].volume() * 4);
    EXPECT_EQ(targets[i]->CountWrong(2), 0U);
  }
}

TEST_F(AgentFixture, ASessionEndsAtItsDeadlineSayingWhatItWaitedFor) {
  daemon.set_timeout(std::chrono::milliseconds(100));
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  Hold(FakeDaemon::Step::kGo);
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
    EXPECT_NE(updated.status.message().find("waiting to be told to go"), std::string::npos);
  }
}

TEST_F(AgentFixture, AnswersQueries) {
  StartPair(FlipMode::kInPlace);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  proto::Query query;
  query.mutable_trace();
  const proto::Answer trace = daemon.Ask("agent-a", query);
  EXPECT_GE(trace.events_size(), 5);
  EXPECT_EQ(rpc::FromProto(daemon.Ask("agent-a", {}).error()).code(), Code::kUnimplemented);
  proto::Rank rank;
  rank.set_channel("policy");
  rank.set_job("trainer");
  rank.set_role(1);
  rank.set_rank_count(2);
  *query.mutable_digest()->mutable_rank() = rank;
  const proto::Answer digest = daemon.Ask("agent-a", query);
  ASSERT_EQ(digest.digests_size(), 1);
  EXPECT_EQ(digest.digests(0).digest().bytes(), 64U * 24 * 4 / 2);
  proto::TensorDigest& part = *query.mutable_digest()->add_boxes();
  part.set_tensor("w");
  part.mutable_box()->add_lo(0);
  part.mutable_box()->add_hi(64);
  part.mutable_box()->add_lo(0);
  part.mutable_box()->add_hi(1);
  EXPECT_EQ(daemon.Ask("agent-a", query).digests(0).digest().bytes(), 32U * 4);
  query.mutable_digest()->set_snapshot_version(7);
  EXPECT_EQ(daemon.Ask("agent-a", query).error().reason(),
            static_cast<std::uint32_t>(Reason::kStaleVersion));
  query.mutable_digest()->clear_snapshot_version();
  part.set_tensor("nope");
  EXPECT_EQ(daemon.Ask("agent-a", query).error().reason(),
            static_cast<std::uint32_t>(Reason::kUnknownTensor));
}

TEST_F(AgentFixture, DigestsASnapshotAlthoughTheMemoryHasMovedOn) {
  auto& source = AddSource(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kInPlace);
  PublishAll(3, wire::SlowConsumer::kSnapshot);
  proto::Query query;
  proto::Rank& rank = *query.mutable_digest()->mutable_rank();
  rank.set_channel("policy");
  rank.set_job("trainer");
  rank.set_role(1);
  rank.set_rank_count(1);
  const std::string before = daemon.Ask("agent-a", query).digests(0).SerializeAsString();
  source.Fill(4);
  EXPECT_NE(daemon.Ask("agent-a", query).digests(0).SerializeAsString(), before);
  query.mutable_digest()->set_snapshot_version(3);
  const proto::Answer kept = daemon.Ask("agent-a", query);
  ASSERT_EQ(kept.digests_size(), 1) << kept.error().message();
  EXPECT_EQ(kept.digests(0).SerializeAsString(), before);
}

}  // namespace
}  // namespace tensorbus::agent
