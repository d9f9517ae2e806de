#include <gtest/gtest.h>

#include "tensorbus/transport/faulty_transport.h"
#include "tests/unit/agent/agent_fixture.h"

// Whatever goes wrong between source and target memory: refused before the flip, with the culprit's
// name; the old version goes on (shadow) or the rank is dirty (in place), and the next session
// repairs it.
namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using testing::IsStatus;
using transport::Fault;
using transport::FaultPlan;
using transport::FaultyTransport;

struct FaultCase {
  const char* name;
  Fault::Kind kind;
  Reason reason = Reason::kChecksumMismatch;
};

std::ostream& operator<<(std::ostream& out, const FaultCase& fault) {
  return out << fault.name;
}

/// Two sources by rows, two targets by columns; "w" is held in two boxes on each side, so that
/// every route has several blocks. The fault hits the first pull of the second session.
class AgentFault : public AgentFixture, public ::testing::WithParamInterface<FaultCase> {
 protected:
  ~AgentFault() override {
    sources.clear();
    targets.clear();
    agent.reset();
    local.reset();
    fault_executor_.Stop();
  }

  std::unique_ptr<transport::Transport> MakeLocal() override {
    Fault fault;
    fault.kind = GetParam().kind;
    fault.pull = 4;  // four routes a session
    fault.block = 0;
    fault.other = 1;
    fault.byte = 3;
    const auto plan = FaultPlan::Create({fault});
    return std::make_unique<FaultyTransport>(
        transport::ShmTransport::Create({.threads = 1, .landing_hook = plan->Hook()}), plan,
        fault_executor_);
  }

  void StartFaultPair(FlipMode flip, Proof proof) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      AddSource(rank, 2, Rows(rank * 32, rank * 32 + 16))
          .AddTensor("w", WeightShape(), Rows(rank * 32 + 16, rank * 32 + 32));
    }
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      AddTarget(rank, 2, Columns(rank * 12, rank * 12 + 6))
          .AddTensor("w", WeightShape(), Columns(rank * 12 + 6, rank * 12 + 12));
    }
    ConnectAll(flip, proof);
  }

  void ExpectNamed(const Status& status) {
    const std::string& message = status.message();
    EXPECT_NE(message.find("policy/trainer rank "), std::string::npos) << message;
    EXPECT_NE(message.find("policy/engine replica 0 rank "), std::string::npos) << message;
    if (GetParam().reason != Reason::kChecksumMismatch) return;
    if (GetParam().kind == Fault::Kind::kLoseReceipts) return;
    EXPECT_NE(message.find("w["), std::string::npos) << message;
  }

  ThreadExecutor fault_executor_{"faults"};
};

TEST_P(AgentFault, ShadowServesTheOldVersion) {
  StartFaultPair(FlipMode::kShadow, Proof::kReadback);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  PublishAll(2);
  for (const auto& updated : UpdateAll()) {
    EXPECT_EQ(updated.status.reason(), GetParam().reason) << updated.status;
    EXPECT_EQ(updated.version, Version{1});
    ExpectNamed(updated.status);
  }
  EXPECT_EQ(targets[0]->CountWrong(1), 0U) << "bit for bit";
  EXPECT_EQ(targets[1]->CountWrong(1), 0U);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
}

TEST_P(AgentFault, InPlaceIsDirtyUntilTheNextSessionRepairsIt) {
  StartFaultPair(FlipMode::kInPlace, Proof::kMemory);
  PublishAll(1);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  PublishAll(2);
  bool any_dirty = false;
  for (const auto& updated : UpdateAll()) {
    EXPECT_FALSE(updated.status.ok());
    EXPECT_EQ(updated.version, Version{1});
    any_dirty = any_dirty || updated.status.reason() == Reason::kDirty;
    ExpectNamed(updated.status);
  }
  EXPECT_TRUE(any_dirty);
  EXPECT_EQ(targets[0]->page().live_version.load(), 1U);
  for (const auto& updated : UpdateAll()) ASSERT_OK(updated.status);
  EXPECT_EQ(targets[0]->CountWrong(2), 0U);
  EXPECT_EQ(targets[1]->CountWrong(2), 0U);
}

INSTANTIATE_TEST_SUITE_P(
    Faults, AgentFault,
    ::testing::Values(FaultCase{"FlipBit", Fault::Kind::kFlipBit},
                      FaultCase{"DropBlock", Fault::Kind::kDropBlock},
                      FaultCase{"RepeatBlock", Fault::Kind::kRepeatBlock},
                      FaultCase{"SwapBlocks", Fault::Kind::kSwapBlocks},
                      FaultCase{"ShiftRow", Fault::Kind::kShiftRow},
                      FaultCase{"AckEarly", Fault::Kind::kAckEarly},
                      FaultCase{"LoseReceipts", Fault::Kind::kLoseReceipts},
                      FaultCase{"PeerLost", Fault::Kind::kFail, Reason::kPeerLost}),
    [](const ::testing::TestParamInfo<FaultCase>& fault) { return std::string(fault.param.name); });

}  // namespace
}  // namespace tensorbus::agent
