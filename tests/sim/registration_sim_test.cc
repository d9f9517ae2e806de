#include <gtest/gtest.h>

#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

// Registrations whose layouts take time to look at: what else happens meanwhile, and what has
// changed when the outcome comes back.
namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using ::testing::HasSubstr;
using testing::IsStatus;

class RegistrationSim : public ::testing::Test {
 protected:
  RegistrationSim() {
    world_.AddAgent("a");
    world_.AddAgent("b");
  }
  Worker& Begin(const std::string& job, Role role, std::uint32_t rank, std::uint32_t count,
                const World::JobOptions& options = {}) {
    return world_.Register(role == Role::kProducer ? "a" : "b", job, role, rank, count, options);
  }
  static World::JobOptions OtherDtype() {
    World::JobOptions options;
    options.change = [](RankLayout& layout) { layout.tensors[0].spec.dtype = DType::kI32; };
    return options;
  }

  World world_;
};

TEST_F(RegistrationSim, LetsAnotherChannelGoOn) {
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, {});
  world_.side_work.duration = 40s;
  World::JobOptions big;
  big.channel = "big";
  const Worker& slow = Begin("other", Role::kProducer, 0, 1, big);
  world_.PublishAll("trainer", 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  world_.executor.Advance(1s);
  EXPECT_OK(world_.worker("engine", 0).updated.value());
  EXPECT_FALSE(slow.registered);
  EXPECT_EQ(world_.core->counts().registrations, 1U);
  world_.executor.Advance(80s);  // checked, then put together
  ASSERT_TRUE(slow.registered);
  EXPECT_OK(*slow.registered);
  EXPECT_EQ(world_.core->counts().agents, 2U);
}

TEST_F(RegistrationSim, ForgetsARankThatLeavesMeanwhile) {
  world_.side_work.duration = 1s;
  world_.Leave(Begin("trainer", Role::kProducer, 0, 1));
  EXPECT_EQ(world_.core->counts().registrations, 0U);
  Worker& again = Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(2500ms);  // entered, behind what was begun; its job is being put together
  EXPECT_EQ(world_.core->counts().ranks, 1U);
  EXPECT_FALSE(again.registered);
  world_.Leave(again);
  world_.executor.Advance(10s);
  EXPECT_EQ(world_.core->counts().registrations, 0U);
  EXPECT_EQ(world_.core->counts().ranks, 0U);
  const Worker& last = Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(10s);
  EXPECT_OK(last.registered.value());
}

TEST_F(RegistrationSim, ForgetsTheRanksOfAnAgentThatDiesMeanwhile) {
  world_.side_work.duration = 1s;
  Begin("trainer", Role::kProducer, 0, 2);
  world_.executor.Advance(1s);
  Begin("trainer", Role::kProducer, 1, 2);
  world_.agent("a").Die();
  world_.executor.Advance(10s);
  EXPECT_EQ(world_.core->counts().registrations, 0U);
  EXPECT_EQ(world_.core->counts().ranks, 0U);
}

TEST_F(RegistrationSim, RefusesASecondRegistrationOfTheSameRankMeanwhile) {
  world_.side_work.duration = 1s;
  Begin("trainer", Role::kProducer, 0, 1);
  const Status second =
      world_.Register("b", "trainer", Role::kProducer, 0, 1, {}).registered.value();
  EXPECT_EQ(second.code(), Code::kAlreadyExists);
  EXPECT_THAT(second.message(), HasSubstr("process 1000 at agent a"));
}

TEST_F(RegistrationSim, TheLastRankIsAnsweredAlthoughAnotherLeft) {
  world_.side_work.duration = 1s;
  Worker& first = Begin("trainer", Role::kProducer, 0, 2);
  world_.executor.Advance(2s);
  ASSERT_OK(first.registered.value());
  const Worker& last = Begin("trainer", Role::kProducer, 1, 2);
  world_.executor.Advance(1500ms);
  world_.Leave(first);
  world_.executor.Advance(5s);
  ASSERT_TRUE(last.registered);
  EXPECT_OK(*last.registered);
}

TEST_F(RegistrationSim, ALastRankWhoseJobBeganAnewMeanwhileIsToldSo) {
  world_.AddAgent("c");
  world_.side_work.duration = 1s;
  world_.Register("c", "trainer", Role::kProducer, 0, 2, {});
  world_.executor.Advance(2s);
  const Worker& last = Begin("trainer", Role::kProducer, 1, 2);
  World::JobOptions anew;
  anew.pid = 2000;
  world_.Register("b", "trainer", Role::kProducer, 0, 2, anew);
  world_.executor.Advance(1500ms);  // the last rank has entered, behind it comes the new process
  world_.agent("c").Die();
  world_.executor.Advance(10s);
  ASSERT_TRUE(last.registered);
  EXPECT_THAT(*last.registered, IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  EXPECT_THAT(last.registered->message(), HasSubstr("restart it"));
  EXPECT_EQ(world_.core->counts().ranks, 1U);
}

TEST_F(RegistrationSim, AReplicaThatLostARankMeanwhileIsIncomplete) {
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.PublishAll("trainer", 1);
  Worker& first = Begin("engine", Role::kConsumer, 0, 2);
  world_.side_work.duration = 1s;
  Worker& last = Begin("engine", Role::kConsumer, 1, 2);
  world_.executor.Advance(1500ms);
  world_.Leave(first);
  world_.executor.Advance(5s);
  EXPECT_OK(last.registered.value());
  world_.Update(last, Selector::kLatest, 5s);
  EXPECT_EQ(world_.core->counts().sessions, 0U);
}

TEST_F(RegistrationSim, ComparesAReplicaWithAManifestThatCameMeanwhile) {
  // What is there first is looked at first: so the manifest comes after or before the replica.
  for (const bool engine_first : {true, false}) {
    SCOPED_TRACE(engine_first);
    World::JobOptions options = OtherDtype();
    World::JobOptions plain;
    options.channel = plain.channel = engine_first ? "after" : "before";
    world_.side_work.duration = 1s;
    if (engine_first) Begin("engine", Role::kConsumer, 0, 1, options);
    const Worker& trainer = Begin("trainer", Role::kProducer, 0, 1, plain);
    if (!engine_first) Begin("engine", Role::kConsumer, 0, 1, options);
    world_.executor.Advance(10s);
    EXPECT_OK(trainer.registered.value());
    // Refused, or entered before the manifest was known and refused with its first request.
    Worker& engine = world_.worker("engine", 0, 0, plain.channel);
    Status status = engine.registered.value();
    if (status.ok()) {
      world_.Update(engine, Selector::kLatest, 5s);
      status = engine.updated.value();
    }
    EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
  }
}

TEST_F(RegistrationSim, ComparesARankWithTheManifestThatIsThereInTheEnd) {
  world_.side_work.duration = 1s;
  Worker& trainer = Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(1500ms);  // being put together
  const Worker& early = Begin("engine", Role::kConsumer, 0, 2, OtherDtype());
  world_.executor.Advance(10s);
  EXPECT_THAT(early.registered.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
  const Worker& late = Begin("engine", Role::kConsumer, 1, 2, OtherDtype());
  world_.Leave(trainer);
  world_.executor.Advance(10s);
  EXPECT_OK(late.registered.value()) << "what it did not fit is gone";
}

TEST_F(RegistrationSim, AReplicaIsNotHeldToWhatARankThatLeftMeanwhileDidWrong) {
  World::JobOptions part;
  part.change = [](RankLayout& layout) {
    Box& box = layout.tensors[0].boxes[0];
    if (box[0].hi == World::kElements) box[0].hi -= 40;
  };
  Begin("engine", Role::kConsumer, 0, 2, part);
  Worker& wrong = Begin("engine", Role::kConsumer, 1, 2, part);
  world_.side_work.duration = 1s;
  Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(2500ms);  // the manifest is known, the replica is being compared
  world_.Leave(wrong);
  world_.executor.Advance(5s);
  Worker& engine = world_.worker("engine", 0);
  world_.Update(engine, Selector::kLatest, 5s);
  EXPECT_FALSE(engine.updated) << "it waits for its other rank";
}

TEST_F(RegistrationSim, OpensNoSessionBeforeAReplicaIsKnownToFit) {
  for (const bool fits : {true, false}) {
    SCOPED_TRACE(fits);
    const std::string channel = fits ? "good" : "bad";
    World::JobOptions options = fits ? World::JobOptions() : OtherDtype();
    options.channel = channel;
    world_.side_work.duration = {};
    Begin("engine", Role::kConsumer, 0, 1, options);
    Worker& engine = world_.worker("engine", 0, 0, channel);
    world_.Update(engine, Selector::kLatest, 60s);
    world_.side_work.duration = 2s;
    options.change = nullptr;
    Worker& trainer = Begin("trainer", Role::kProducer, 0, 1, options);
    world_.executor.AdvanceUntil([&] { return trainer.registered.has_value(); }, 10s);
    ASSERT_OK(trainer.registered.value());
    const int before = world_.agent("b").received[Received::kPrepare];
    world_.Publish(trainer, 1);
    ASSERT_OK(trainer.published.value());
    world_.executor.Advance(1s);
    EXPECT_EQ(world_.agent("b").received[Received::kPrepare], before) << "not compared yet";
    world_.executor.Advance(5s);
    ASSERT_TRUE(engine.updated);
    if (fits) {
      EXPECT_OK(*engine.updated);
    } else {
      EXPECT_THAT(*engine.updated, IsStatus(Code::kFailedPrecondition, Reason::kDtypeMismatch));
      EXPECT_EQ(world_.agent("b").received[Received::kPrepare], before);
    }
  }
}

TEST_F(RegistrationSim, NothingIsReadBeforeItsProducerIsPutTogether) {
  Begin("engine", Role::kConsumer, 0, 1);
  world_.Update(world_.worker("engine", 0), Selector::kLatest, 5s);
  world_.side_work.duration = 1s;
  Worker& trainer = Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(1500ms);
  ASSERT_FALSE(trainer.registered);
  world_.Publish(trainer, 1);  // although it was not told that it is registered
  world_.executor.Advance(100ms);
  EXPECT_EQ(world_.core->counts().sessions, 0U);
  world_.executor.Advance(3s);
  EXPECT_OK(world_.worker("engine", 0).updated.value());
}

TEST_F(RegistrationSim, GivesUpAtTheDeadlineAndLeavesNothingBehind) {
  world_.side_work.duration = 10min;
  const Worker& trainer = Begin("trainer", Role::kProducer, 0, 1);
  world_.executor.Advance(6min);
  EXPECT_THAT(trainer.registered.value(), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  EXPECT_THAT(trainer.registered->message(), HasSubstr("policy/trainer rank 0 of 1"));
  world_.executor.Advance(1h);
  EXPECT_EQ(world_.core->counts().ranks, 0U);
  EXPECT_EQ(world_.core->counts().registrations, 0U);
  world_.side_work.duration = {};
  EXPECT_OK(Begin("trainer", Role::kProducer, 0, 1).registered.value());
}

TEST_F(RegistrationSim, RefusesAReplicaThatHoldsATensorInPart) {
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  World::JobOptions options;
  options.change = [](RankLayout& layout) {
    Box& box = layout.tensors[0].boxes[0];
    if (box[0].hi == World::kElements) box[0].hi -= 40;
  };
  EXPECT_OK(Begin("engine", Role::kConsumer, 0, 2, options).registered.value());
  const Status status = Begin("engine", Role::kConsumer, 1, 2, options).registered.value();
  EXPECT_THAT(status, IsStatus(Code::kFailedPrecondition, Reason::kLayoutMismatch));
  for (const char* part : {"policy/engine replica 0 holds tensor \"w\" in part", "[800:840]",
                           "policy/engine replica 0 rank 1 of 2 holds [420:800]", "leave_out"}) {
    EXPECT_THAT(status.message(), HasSubstr(part));
  }
  options.leave_out = {"w"};
  EXPECT_OK(Begin("engine", Role::kConsumer, 1, 2, options).registered.value());
}

}  // namespace
}  // namespace tensorbus::sim
