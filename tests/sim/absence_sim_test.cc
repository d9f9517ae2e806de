#include <gtest/gtest.h>

#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

// What is said of ranks that have not come or have left, of channels that nobody is in, and of
// layouts that nothing can be compared with yet.
namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsStatus;
using ::testing::Not;

class AbsenceSim : public ::testing::Test {
 protected:
  AbsenceSim() {
    world_.AddAgent("a");
    world_.AddAgent("b");
  }
  void StartTrainer() { world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {}); }
  void StartEngine(const World::JobOptions& options = {}) {
    world_.StartJob("engine", Role::kConsumer, 2, {"b"}, options);
  }
  void LeaveAll(const std::string& job, const std::string& why = "worker process 4711 ended") {
    for (Worker* worker : world_.WorkersOf(job)) world_.Leave(*worker, why);
  }
  void Sync() {
    world_.UpdateAll("engine", Selector::kLatest, 10s);
    world_.executor.Advance(1s);
  }
  static World::JobOptions In(const std::string& channel) {
    World::JobOptions options;
    options.channel = channel;
    return options;
  }
  std::vector<std::string> Channels() {
    std::vector<std::string> names;
    const proto::StatusReply reply = world_.GetStatus();
    for (const auto& channel : reply.channels()) names.push_back(channel.channel());
    return names;
  }
  proto::ReplicaStatus ReplicaNow() { return world_.GetStatus().channels(0).replicas(0); }

  World world_;
};

// ---- channels that nobody is in

TEST_F(AbsenceSim, AChannelThatOnlyAConsumerNamedGoesWithItsLastRank) {
  StartTrainer();
  StartEngine();
  world_.PublishAll("trainer", 1);
  world_.StartJob("stray", Role::kConsumer, 2, {"b"}, In("polcy"));
  EXPECT_EQ(Channels(), (std::vector<std::string>{"polcy", "policy"}));
  EXPECT_THAT(world_.Explain("w").status().message(), HasSubstr("choose one with --channel"));
  world_.Leave(world_.worker("stray", 0, 0, "polcy"));
  EXPECT_EQ(Channels().size(), 2U) << "one of its ranks is there";
  world_.Leave(world_.worker("stray", 1, 0, "polcy"));
  EXPECT_EQ(Channels(), std::vector<std::string>{"policy"});
  EXPECT_OK(world_.Explain("w"));
}

TEST_F(AbsenceSim, SoItDoesWhenTheAgentIsLost) {
  world_.StartJob("stray", Role::kConsumer, 2, {"a", "b"}, In("polcy"));
  world_.agent("a").Die();
  world_.executor.RunReady();
  EXPECT_EQ(Channels().size(), 1U);
  world_.agent("b").Die();
  world_.executor.RunReady();
  EXPECT_EQ(Channels().size(), 0U);
}

TEST_F(AbsenceSim, NumbersThatOnlyEnginesRememberedOutliveThem) {
  World::JobOptions back;
  back.known_epoch = 3;
  back.live_version = 12;
  StartEngine(back);
  LeaveAll("engine");
  StartTrainer();
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 4U);
  EXPECT_EQ(world_.worker("trainer", 0).latest, 12U);
}

TEST_F(AbsenceSim, AnEpochThatOnlyAnAgentRememberedOutlivesItsEngine) {
  World::JobOptions seen;
  seen.seen_epoch = 5;
  StartEngine(seen);
  LeaveAll("engine");
  StartTrainer();
  EXPECT_EQ(world_.worker("trainer", 0).epoch, 6U);
}

TEST_F(AbsenceSim, AChannelThatIsEmptyEndsNoEpochOfAnother) {
  World::JobOptions seen;
  seen.seen_epoch = 5;
  StartEngine(seen);
  LeaveAll("engine");
  World::JobOptions back = In("reward");
  back.known_epoch = 3;
  back.live_version = 9;
  world_.StartJob("critic", Role::kProducer, 1, {"a"}, back);
  EXPECT_EQ(world_.worker("critic", 0, 0, "reward").epoch, 3U);
}

TEST_F(AbsenceSim, WithoutANameTheChannelInUseIsMeant) {
  World::JobOptions back = In("old");
  back.live_version = 12;
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, back);
  world_.Leave(world_.worker("engine", 0, 0, "old"));
  StartTrainer();
  world_.PublishAll("trainer", 1);
  ASSERT_EQ(Channels(), (std::vector<std::string>{"old", "policy"})) << "its number is remembered";
  ASSERT_OK_AND_ASSIGN(const proto::VerifyReply verified, world_.Verify());
  EXPECT_EQ(verified.channel(), "policy");
  ASSERT_OK_AND_ASSIGN(const proto::ExplainReply explained, world_.Explain("w"));
  EXPECT_EQ(explained.channel(), "policy");
  world_.StartJob("critic", Role::kProducer, 1, {"a"}, In("reward"));
  EXPECT_THAT(world_.Verify().status(), IsStatus(Code::kInvalidArgument, Reason::kNone));
}

// ---- layouts that nothing can be compared with

TEST_F(AbsenceSim, SaysThatALayoutHasNotBeenCompared) {
  World::JobOptions other;
  other.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
  StartEngine(other);
  EXPECT_EQ(ReplicaNow().layout(), "not_compared");
  EXPECT_EQ(ReplicaNow().state(), "idle");
  world_.UpdateAll("engine", Selector::kLatest, 3s);
  ASSERT_EQ(world_.WhoIsMissing().size(), 1U);
  EXPECT_THAT(world_.WhoIsMissing()[0].remedy(), HasSubstr("layout is compared"));
  world_.executor.Advance(4s);
  EXPECT_THAT(world_.worker("engine", 0).updated.value().message(),
              AllOf(HasSubstr("start the trainer"),
                    HasSubstr("this replica's layout is compared with the producer's once it is "
                              "there")));
  world_.side_work.duration = 1s;
  for (const std::uint32_t rank : {0U, 1U}) {
    world_.Register("a", "trainer", Role::kProducer, rank, 2, {});
  }
  world_.executor.Advance(3500ms);  // its layout is put together, and being compared
  ASSERT_OK(world_.worker("trainer", 1).registered.value());
  EXPECT_EQ(ReplicaNow().layout(), "not_compared");
  world_.executor.Advance(1s);
  EXPECT_EQ(ReplicaNow().layout(), "does_not_fit");
  EXPECT_EQ(ReplicaNow().state(), "idle");
  EXPECT_EQ(ReplicaNow().error().reason(), static_cast<std::uint32_t>(Reason::kDtypeMismatch));
  EXPECT_THAT(ReplicaNow().error().message(), HasSubstr("policy/engine replica 0 rank 0 of 2"));
}

TEST_F(AbsenceSim, SaysThatALayoutFits) {
  StartTrainer();
  StartEngine();
  EXPECT_EQ(ReplicaNow().layout(), "fits");
  EXPECT_FALSE(ReplicaNow().has_error());
  world_.Leave(world_.worker("engine", 0));
  EXPECT_EQ(ReplicaNow().layout(), "not_compared") << "not whole";
}

TEST_F(AbsenceSim, SaysItOfAProducerOfWhichARankIsMissing) {
  StartEngine();
  world_.Register("a", "trainer", Role::kProducer, 0, 3, {});
  world_.UpdateAll("engine", Selector::kLatest, 3s);
  const auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 4U);  // the engine waits for two, and so does the channel
  EXPECT_EQ(missing[0].who(), "policy/trainer rank 1 of 3 has not registered yet");
  EXPECT_THAT(missing[0].remedy(), HasSubstr("layout is compared"));
  EXPECT_THAT(missing[1].remedy(), Not(HasSubstr("layout is compared"))) << "once is enough";
}

// ---- ranks that left

TEST_F(AbsenceSim, SaysSinceWhenAProducerIsGoneAndWhy) {
  StartTrainer();
  world_.PublishAll("trainer", 7);
  world_.Leave(world_.worker("trainer", 0), "worker process 1 ended");
  world_.executor.Advance(10s);
  world_.Leave(world_.worker("trainer", 1), "worker process 2 closed its connection");
  world_.executor.Advance(50s);
  const auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 2U);
  EXPECT_EQ(missing[0].what(), "channel policy waits for its producer");
  EXPECT_EQ(missing[0].who(),
            "policy/trainer rank 0 of 2 left 60.0 s ago (worker process 1 ended)");
  EXPECT_DOUBLE_EQ(missing[0].waiting_seconds(), 60.0);
  EXPECT_THAT(missing[0].remedy(), HasSubstr("start it again"));
  EXPECT_THAT(missing[1].who(), HasSubstr("left 50.0 s ago"));
  EXPECT_DOUBLE_EQ(missing[1].waiting_seconds(), 50.0);
  const Status verify = world_.Verify().status();
  EXPECT_THAT(verify, IsStatus(Code::kNotFound, Reason::kNone));
  EXPECT_EQ(verify.message(),
            "nobody holds version 7 of channel policy right now: all 2 ranks of policy/trainer "
            "left, the last 50.0 s ago (worker process 2 closed its connection); no replica is "
            "there");
  const Status explain = world_.Explain("misspelt").status();
  EXPECT_THAT(explain, IsStatus(Code::kFailedPrecondition, Reason::kMissingRank));
  EXPECT_THAT(explain.message(), HasSubstr("all 2 ranks of policy/trainer left"));
}

TEST_F(AbsenceSim, TellsWhoLeftFromWhoNeverCame) {
  world_.Register("a", "trainer", Role::kProducer, 0, 3, {});
  world_.executor.Advance(5s);
  world_.Register("a", "trainer", Role::kProducer, 1, 3, {});
  world_.executor.Advance(5s);
  world_.Leave(world_.worker("trainer", 1));
  world_.executor.Advance(3s);
  const auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 2U);
  EXPECT_THAT(missing[0].who(), HasSubstr("rank 1 of 3 left 3.0 s ago"));
  EXPECT_DOUBLE_EQ(missing[0].waiting_seconds(), 3.0);
  EXPECT_THAT(missing[1].who(), HasSubstr("rank 2 of 3 has not registered yet"));
  EXPECT_DOUBLE_EQ(missing[1].waiting_seconds(), 13.0) << "since the job began";
  EXPECT_THAT(world_.Explain("w").status().message(),
              AllOf(HasSubstr("policy/trainer rank 1 of 3 left 3.0 s ago"),
                    HasSubstr("policy/trainer rank 2 of 3 has not registered yet")));
  EXPECT_THAT(world_.Verify().status().message(), HasSubstr("nothing has been published"));
  // A new process of a rank that was there begins the job anew: nobody has left that one.
  World::JobOptions anew;
  anew.pid = 2000;
  world_.Register("a", "trainer", Role::kProducer, 1, 3, anew);
  world_.executor.Advance(2s);
  for (const proto::MissingStatus& item : world_.WhoIsMissing()) {
    EXPECT_THAT(item.who(), HasSubstr("has not registered yet"));
    EXPECT_DOUBLE_EQ(item.waiting_seconds(), 2.0);
  }
}

TEST_F(AbsenceSim, ARankThatCameBackHasNotLeft) {
  StartTrainer();
  world_.Leave(world_.worker("trainer", 1));
  World::JobOptions back;
  back.known_epoch = 1;
  world_.Register("a", "trainer", Role::kProducer, 1, 2, back);
  EXPECT_TRUE(world_.WhoIsMissing().empty());
  StartEngine();
  world_.Leave(world_.worker("engine", 1));
  world_.Register("b", "engine", Role::kConsumer, 1, 2, {});
  EXPECT_TRUE(world_.WhoIsMissing().empty());
}

TEST_F(AbsenceSim, NamesTheRankOfAReplicaThatLeft) {
  StartTrainer();
  StartEngine();
  world_.executor.Advance(4s);
  world_.Leave(world_.worker("engine", 1), "worker process 9 ended");
  world_.executor.Advance(6s);
  auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 1U) << "who has not asked is not missing while nobody asks";
  EXPECT_EQ(missing[0].what(), "policy/engine replica 0 waits for its ranks");
  EXPECT_EQ(missing[0].who(),
            "policy/engine replica 0 rank 1 of 2 left 6.0 s ago (worker process 9 ended)");
  EXPECT_DOUBLE_EQ(missing[0].waiting_seconds(), 6.0);
  world_.Update(world_.worker("engine", 0), Selector::kNext, 3s);
  world_.executor.Advance(1s);
  missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 1U);
  EXPECT_EQ(missing[0].what(), "policy/engine replica 0 waits for a version");
  EXPECT_DOUBLE_EQ(missing[0].waiting_seconds(), 1.0);
  world_.executor.Advance(3s);
  EXPECT_THAT(world_.worker("engine", 0).updated.value().message(),
              HasSubstr("rank 1 of 2 left 9.0 s ago (worker process 9 ended)"));
}

TEST_F(AbsenceSim, ARankOfAReplicaThatNeverCameIsMissedSinceTheFirst) {
  StartTrainer();
  world_.Register("b", "engine", Role::kConsumer, 0, 2, {});
  world_.executor.Advance(8s);
  const auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 1U);
  EXPECT_EQ(missing[0].who(), "policy/engine replica 0 rank 1 of 2 has not registered yet");
  EXPECT_DOUBLE_EQ(missing[0].waiting_seconds(), 8.0);
}

TEST_F(AbsenceSim, KeepsLittleOfAReasonThatIsLong) {
  StartTrainer();
  world_.Leave(world_.worker("trainer", 0), "it " + std::string(100'000, '.') + " ended");
  const auto missing = world_.WhoIsMissing();
  ASSERT_EQ(missing.size(), 1U);
  EXPECT_LT(missing[0].who().size(), 400U);
  EXPECT_THAT(missing[0].who(), HasSubstr(" ended)"));
}

// ---- why nobody holds a version

TEST_F(AbsenceSim, SaysWhyNobodyHoldsAVersion) {
  EXPECT_THAT(world_.Verify().status().message(), HasSubstr("there is no channel"));
  StartEngine();
  EXPECT_EQ(world_.Verify().status().message(),
            "nothing has been published on channel policy yet: no producer has registered yet");
  StartTrainer();
  EXPECT_EQ(world_.Verify().status().message(), "nothing has been published on channel policy yet");
  world_.Publish(world_.worker("trainer", 0), 7);
  EXPECT_THAT(world_.Verify().status().message(),
              AllOf(HasSubstr("policy/trainer rank 1 of 2 has not published version 7"),
                    HasSubstr("engine replica 0 serves none")));
  world_.Publish(world_.worker("trainer", 1), 7);
  Sync();
  EXPECT_EQ(world_.Verify(8).status().message(),
            "version 8 of channel policy has not been published; the newest is 7");
  EXPECT_THAT(world_.Verify(5).status().message(),
              AllOf(HasSubstr("trainer may write its memory again, or has"),
                    HasSubstr("engine replica 0 serves version 7")));
  world_.Leave(world_.worker("engine", 1));
  EXPECT_THAT(world_.Verify(5).status().message(), HasSubstr("engine replica 0 is incomplete"));
  LeaveAll("trainer");
  World::JobOptions anew;
  anew.pid = 2000;
  world_.StartJob("trainer", Role::kProducer, 2, {"a"}, anew);
  EXPECT_THAT(world_.Verify(7).status().message(),
              HasSubstr("the producer that is there, trainer, has not published it"));
}

// ---- tensors, when only engines are there

TEST_F(AbsenceSim, ExplainsWhatReplicasHoldWithoutAProducer) {
  StartEngine();
  ASSERT_OK_AND_ASSIGN(proto::ExplainReply reply, world_.Explain("w"));
  EXPECT_EQ(reply.holders_size(), 2);
  EXPECT_EQ(reply.routes_size(), 0);
  EXPECT_EQ(reply.why_no_routes(), "no producer has registered yet");
  const Status unknown = world_.Explain("nrom").status();
  EXPECT_THAT(unknown, IsStatus(Code::kNotFound, Reason::kUnknownTensor));
  EXPECT_THAT(unknown.message(),
              AllOf(HasSubstr("as far as its replicas show"),
                    HasSubstr("no producer has registered yet"), HasSubstr("nearest names: norm")));
  StartTrainer();
  LeaveAll("trainer");
  ASSERT_OK_AND_ASSIGN(reply, world_.Explain("w"));
  EXPECT_THAT(reply.why_no_routes(), HasSubstr("all 2 ranks of policy/trainer left"));
}

}  // namespace
}  // namespace tensorbus::sim
