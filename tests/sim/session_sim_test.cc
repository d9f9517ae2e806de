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

class SessionSim : public ::testing::Test {
 protected:
  void Start(const World::JobOptions& engine = {}) {
    world_.AddAgent("a");
    world_.AddAgent("b");
    world_.StartJob("trainer", Role::kProducer, 2, {"a"}, {});
    world_.StartJob("engine", Role::kConsumer, 3, {"b"}, engine);
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

  World world_;
};

TEST_F(SessionSim, BringsAVersionToAReplica) {
  Start();
  world_.PublishAll("trainer", 7);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ExpectServes(7);
  world_.ExpectQuiet();
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

}  // namespace
}  // namespace tensorbus::sim
