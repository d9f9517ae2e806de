#include <gtest/gtest.h>

#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

// What a rank is told that gives up waiting before its request ends.
namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using daemon::SlowConsumer;
using ::testing::HasSubstr;
using testing::IsStatus;
using ::testing::Not;

class WaitSim : public ::testing::Test {
 protected:
  void SetUp() override {
    world_.AddAgent("a");
    world_.AddAgent("e");
  }
  void StartTrainer() { world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {}); }
  void StartEngine() { world_.StartJob("engine", Role::kConsumer, 2, {"e"}, {}); }
  Worker& Engine(std::uint32_t rank) { return world_.worker("engine", rank); }
  Worker& Trainer(std::uint32_t rank) { return world_.worker("trainer", rank); }
  /// What rank 0 of the engine is told three seconds after it asked.
  std::string Told() {
    world_.executor.Advance(3s);
    const Status status = world_.Explain(Engine(0));
    EXPECT_THAT(status, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
    EXPECT_THAT(status.message(), HasSubstr("waited 3.0 s for the next version"));
    EXPECT_FALSE(Engine(0).updated) << "the request goes on";
    return status.message();
  }
  void AskAll() { world_.UpdateAll("engine", Selector::kNext, 60s); }

  World world_;
};

TEST_F(WaitSim, NamesTheTrainerThatIsNotThere) {
  StartEngine();
  AskAll();
  EXPECT_THAT(Told(), HasSubstr("a producer of channel policy has not registered"));
}

TEST_F(WaitSim, NamesTheRankOfTheReplicaThatIsNotThere) {
  world_.Register("e", "engine", Role::kConsumer, 0, 2, {});
  world_.Update(Engine(0), Selector::kNext, 60s);
  EXPECT_THAT(Told(), HasSubstr("policy/engine replica 0 rank 1 of 2 has not registered"));
}

TEST_F(WaitSim, NamesTheRankThatHasNotAsked) {
  StartTrainer();
  StartEngine();
  world_.Update(Engine(0), Selector::kNext, 60s);
  EXPECT_THAT(Told(), HasSubstr("rank 1 of 2 has not asked for a version"));
}

TEST_F(WaitSim, NamesTheTrainerRankThatHasNotPublished) {
  StartTrainer();
  StartEngine();
  AskAll();
  world_.Publish(Trainer(1), 4);
  EXPECT_THAT(Told(), HasSubstr("policy/trainer rank 0 of 2 has not published version 4"));
}

TEST_F(WaitSim, SaysThatTheNewestVersionWasTakenBack) {
  StartTrainer();
  world_.PublishAll("trainer", 4, SlowConsumer::kSkip);
  for (const std::uint32_t rank : {0U, 1U}) world_.Release(Trainer(rank), 4, 60s);
  StartEngine();
  AskAll();
  EXPECT_THAT(Told(), HasSubstr("took the memory of version 4, its newest, back before"));
}

TEST_F(WaitSim, NamesWhoASessionWaitsFor) {
  StartTrainer();
  StartEngine();
  world_.PublishAll("trainer", 4);
  world_.agent("a").mute.insert(proto::DaemonMessage::kPrepare);
  AskAll();
  const std::string told = Told();
  EXPECT_THAT(told, HasSubstr("is preparing version 4"));
  EXPECT_THAT(told, HasSubstr("policy/trainer rank 0 of 2 (agent a) has not answered Prepare"));
  EXPECT_THAT(told, Not(HasSubstr("agent e")));
}

TEST_F(WaitSim, NamesTheReplicaThatHoldsTheTrainersMemory) {
  StartTrainer();
  StartEngine();
  world_.PublishAll("trainer", 4);
  world_.Release(Trainer(1), 4, 60s);
  world_.executor.Advance(2s);
  const Status status = world_.Explain(Trainer(1), 4);
  EXPECT_THAT(status, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_THAT(status.message(),
              HasSubstr("waited 2.0 s to write the memory of version 4: policy/engine replica 0"));
  EXPECT_FALSE(Trainer(1).released[4]);
  EXPECT_THAT(world_.Explain(Trainer(0), 4).message(), HasSubstr("waits for nothing"));
}

TEST_F(WaitSim, AnswersWhoeverWaitsForNothing) {
  StartTrainer();
  StartEngine();
  EXPECT_THAT(world_.Explain(Engine(0)), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
  EXPECT_THAT(world_.Explain(Trainer(0), 9), IsStatus(Code::kDeadlineExceeded, Reason::kBusy));
}

}  // namespace
}  // namespace tensorbus::sim
