#include <gtest/gtest.h>
#include <thread>

#include "tests/testing/status_matchers.h"
#include "tests/unit/agent/agent_fixture.h"

// What an agent says of versions that its ranks still hold: to a daemon that does not know them,
// and of ranks that published through an agent that is gone.
namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using testing::FakeWorker;
using testing::IsStatus;

class AgentReturn : public AgentFixture {
 protected:
  /// What the producer rank said in its last registration.
  proto::RegisterRank LastOf(std::uint32_t rank) {
    proto::RegisterRank last;
    for (const auto& message : daemon.Received(proto::AgentMessage::kRegisterRank)) {
      const proto::RegisterRank& registered = message.register_rank();
      if (registered.rank().job() == "trainer" && registered.rank().rank() == rank) {
        last = registered;
      }
    }
    return last;
  }
  static std::vector<std::uint64_t> HeldBy(const proto::RegisterRank& registered) {
    std::vector<std::uint64_t> versions;
    for (const proto::HeldVersion& held : registered.held()) versions.push_back(held.version());
    return versions;
  }
  /// The daemon is gone and another one has heard of every rank.
  void CrashDaemon() {
    daemon.Crash(/*accept_again=*/true);
    registered_ += sources.size() + targets.size();
    ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRegisterRank, registered_));
  }
  void StartSources() {
    StartPair(FlipMode::kInPlace);
    registered_ = 4;
  }
  /// A producer that comes from another agent.
  FakeWorker& ComeBack(const wire::Return& back) {
    FakeWorker& source = AddSource(0, 1, Rows(0, 64));
    source.back = back;
    source.page().write_count = back.write_count;
    return source;
  }
  static wire::Return Published(std::uint64_t version) {
    return {.epoch = ChannelEpoch{3},
            .published = Version{version},
            .publishing = {},
            .held = {.version = Version{version}, .min_replicas = 2},
            .write_count = 7};
  }

  std::size_t registered_ = 0;
};

TEST_F(AgentReturn, TellsADaemonThatRestartedWhatItsRanksHold) {
  StartSources();
  PublishAll(1, wire::SlowConsumer::kSnapshot);
  PublishAll(2);
  ASSERT_NO_FATAL_FAILURE(CrashDaemon());
  for (const std::uint32_t rank : {0U, 1U}) {
    const proto::RegisterRank registered = LastOf(rank);
    EXPECT_EQ(registered.live_version(), 2U);
    EXPECT_EQ(registered.publishing(), 0U);
    ASSERT_EQ(HeldBy(registered), (std::vector<std::uint64_t>{1, 2}));
    EXPECT_EQ(registered.held(0).policy(), 3U);
    EXPECT_EQ(registered.held(0).keep_last(), 1U);
    EXPECT_EQ(registered.held(1).policy(), 1U);
    EXPECT_EQ(registered.held(1).min_replicas(), 1U);
  }
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
  EXPECT_EQ(targets[1]->CountWrong(2), 0U);
}

TEST_F(AgentReturn, HoldsNothingThatWasReleasedOrWritten) {
  StartSources();
  PublishAll(1);
  ASSERT_OK(sources[0]->Release(1).status);
  sources[1]->BumpWriteCount();
  ASSERT_NO_FATAL_FAILURE(CrashDaemon());
  for (const std::uint32_t rank : {0U, 1U}) {
    EXPECT_EQ(LastOf(rank).live_version(), 1U);
    EXPECT_EQ(HeldBy(LastOf(rank)), std::vector<std::uint64_t>{}) << rank;
  }
}

TEST_F(AgentReturn, HoldsNoSnapshotThatWasDropped) {
  StartSources();
  PublishAll(1, wire::SlowConsumer::kSnapshot);
  PublishAll(2, wire::SlowConsumer::kSnapshot);
  proto::DaemonMessage message;
  proto::Rank& rank = *message.mutable_drop_snapshot()->mutable_rank();
  rank.set_channel("policy");
  rank.set_job("trainer");
  rank.set_role(1);
  rank.set_rank_count(2);
  message.mutable_drop_snapshot()->set_version(2);
  daemon.SendToAll(message);
  ASSERT_NO_FATAL_FAILURE(CrashDaemon());
  EXPECT_EQ(HeldBy(LastOf(0)), std::vector<std::uint64_t>{1});
  EXPECT_EQ(HeldBy(LastOf(1)), (std::vector<std::uint64_t>{1, 2}));
}

TEST_F(AgentReturn, SaysWhichPublishWasNotAnswered) {
  StartSources();
  PublishAll(1);
  sources[0]->BumpWriteCount();
  daemon.set_publish_time(std::chrono::hours(1));
  std::thread publishing([&] { EXPECT_OK(sources[0]->Publish(2)); });
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kPublish, 3));
  daemon.set_publish_time({});
  CrashDaemon();
  publishing.join();
  EXPECT_EQ(LastOf(0).live_version(), 1U);
  EXPECT_EQ(LastOf(0).publishing(), 2U);
  EXPECT_EQ(HeldBy(LastOf(0)), std::vector<std::uint64_t>{});
  EXPECT_EQ(LastOf(1).publishing(), 0U);
  CrashDaemon();
  EXPECT_EQ(LastOf(0).live_version(), 2U);
  EXPECT_EQ(LastOf(0).publishing(), 0U);
  EXPECT_EQ(HeldBy(LastOf(0)), std::vector<std::uint64_t>{2});
}

TEST_F(AgentReturn, SaysItAlsoOfAPublishThatWasGivenUpWithTheDaemonGone) {
  daemon_wait = std::chrono::milliseconds(20);
  Restart();
  AddSource(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kInPlace);
  PublishAll(1);
  daemon.set_publish_time(std::chrono::hours(1));
  std::thread publishing([&] {
    EXPECT_THAT(sources[0]->Publish(2), IsStatus(Code::kUnavailable, Reason::kNotRunning));
  });
  EXPECT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kPublish, 2));
  daemon.Crash(/*accept_again=*/false);
  publishing.join();
  registered_ = 1;
  ASSERT_NO_FATAL_FAILURE(CrashDaemon());
  EXPECT_EQ(LastOf(0).live_version(), 1U);
  EXPECT_EQ(LastOf(0).publishing(), 2U);
}

TEST_F(AgentReturn, ARankThatGivesAPublishUpLeavesToComeBackWithTheRest) {
  daemon_wait = std::chrono::milliseconds(20);
  publish_wait = std::chrono::milliseconds(100);
  Restart();
  AddSource(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kInPlace);
  PublishAll(1, wire::SlowConsumer::kSnapshot);
  daemon.set_publish_time(std::chrono::hours(1));
  EXPECT_THAT(sources[0]->Publish(2), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  ASSERT_TRUE(daemon.AwaitReceived(proto::AgentMessage::kRegisterRank, 2));
  EXPECT_TRUE(daemon.Received(proto::AgentMessage::kLeaveRank).back().leave_rank().returns());
  EXPECT_EQ(LastOf(0).publishing(), 2U);
  EXPECT_EQ(HeldBy(LastOf(0)), std::vector<std::uint64_t>{1});
  daemon.set_publish_time({});
  ASSERT_OK(sources[0]->Publish(2));
  registered_ = 2;
  CrashDaemon();
  EXPECT_EQ(LastOf(0).publishing(), 0U);
  EXPECT_EQ(HeldBy(LastOf(0)), (std::vector<std::uint64_t>{1, 2}));
}

TEST_F(AgentReturn, TakesOverWhatAProducerPublishedThroughAnother) {
  FakeWorker& source = ComeBack(Published(5));
  AddTarget(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kInPlace);
  source.Fill(5);
  const proto::RegisterRank registered = LastOf(0);
  EXPECT_EQ(registered.known_epoch(), 3U);
  EXPECT_EQ(registered.live_version(), 5U);
  ASSERT_EQ(HeldBy(registered), std::vector<std::uint64_t>{5});
  EXPECT_EQ(registered.held(0).policy(), 1U);
  EXPECT_EQ(registered.held(0).min_replicas(), 2U);
  EXPECT_THAT(source.Publish(5), IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(5), 0U);
}

TEST_F(AgentReturn, TakesOverNothingThatMayHaveChanged) {
  const auto held_after = [this](const wire::Return& back, std::uint64_t write_count,
                                 std::uint64_t released) {
    Restart();
    FakeWorker& source = ComeBack(back);
    source.page().write_count = write_count;
    source.page().released_version = released;
    ConnectAll(FlipMode::kInPlace);
    EXPECT_EQ(LastOf(0).live_version(), 5U);
    return HeldBy(LastOf(0));
  };
  EXPECT_EQ(held_after(Published(5), 7, 4), std::vector<std::uint64_t>{5});
  EXPECT_EQ(held_after(Published(5), 8, 4), std::vector<std::uint64_t>{}) << "written";
  EXPECT_EQ(held_after(Published(5), 7, 5), std::vector<std::uint64_t>{}) << "released";
  wire::Return snapshot = Published(5);
  snapshot.held.policy = wire::SlowConsumer::kSnapshot;
  EXPECT_EQ(held_after(snapshot, 7, 4), std::vector<std::uint64_t>{}) << "gone with its agent";
  wire::Return unsure = Published(5);
  unsure.held = {};
  unsure.publishing = Version{6};
  EXPECT_EQ(held_after(unsure, 7, 4), std::vector<std::uint64_t>{});
  EXPECT_EQ(LastOf(0).publishing(), 6U);
}

TEST_F(AgentReturn, TakesOverNothingOfARegistrationThatFailed) {
  FakeWorker& source = ComeBack(Published(5));
  ASSERT_OK(source.Connect());
  source.registration.pieces[0].offset = 1 << 20;
  EXPECT_FALSE(source.Register().ok());
  source.registration.pieces[0].offset = 0;
  source.back.held = {};
  ASSERT_OK(source.Register());
  EXPECT_EQ(LastOf(0).live_version(), 5U);
  EXPECT_EQ(HeldBy(LastOf(0)), std::vector<std::uint64_t>{});
}

TEST_F(AgentReturn, GivesUpWhenReceiptsAreNotMadeInTime) {
  register_wait = {};  // while the worker is asked to pack
  Restart();
  wire::Return back = Published(5);
  back.held.receipts = true;
  FakeWorker& source = ComeBack(back);
  source.UsePrivateMemory(static_cast<std::uint8_t>(MemoryMode::kBucket));
  ASSERT_OK(source.Connect());
  const Status late = source.Register().status();
  EXPECT_THAT(late, IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  EXPECT_NE(late.message().find("receipts of version 5"), std::string::npos) << late;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(daemon.Received(proto::AgentMessage::kRegisterRank).empty())
      << "what was made too late changes nothing";
}

TEST_F(AgentReturn, MakesReceiptsAgainThatCatchAWriterWhoBypassesTheFence) {
  wire::Return back = Published(5);
  back.held.receipts = true;
  FakeWorker& source = ComeBack(back);
  AddTarget(0, 1, Rows(0, 64));
  ConnectAll(FlipMode::kShadow);
  source.At(0, 0) += 1;
  for (const auto& updated : UpdateAll()) {
    EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kWriteDuringPublish));
  }
}

}  // namespace
}  // namespace tensorbus::agent
