#include <gtest/gtest.h>

#include "tests/unit/agent/agent_fixture.h"

// A copy that goes by wrong addresses: what is read back goes by the registration's own.
namespace tensorbus::agent {
namespace {

using testing::AgentFixture;
using testing::IsStatus;

enum class Shifted { kBlocks, kAliases };

/// Copies what comes from rank 1 one row too early, and touches nothing else of the routes.
class ShiftingTransport final : public transport::Transport {
 public:
  explicit ShiftingTransport(Shifted shifted) : shifted_(shifted) {}

  std::string_view name() const override { return inner_->name(); }
  std::string endpoint() const override { return inner_->endpoint(); }
  Status Expose(const transport::RouteKey& key, transport::RouteEnd source) override {
    return inner_->Expose(key, std::move(source));
  }
  void Withdraw(const transport::RouteKey& key) override { inner_->Withdraw(key); }
  void Pull(const transport::RouteKey& key, transport::RouteEnd target,
            transport::PullOptions options, Done done) override {
    if (key.source_rank == 1 && shifted_ == Shifted::kBlocks) {
      for (StridedBlock& block : target.blocks) block.base -= block.strides[0];
    }
    if (key.source_rank == 1 && shifted_ == Shifted::kAliases) {
      for (transport::RouteEnd::Alias& alias : target.aliases) {
        alias.place.base -= alias.place.strides[0];
      }
    }
    inner_->Pull(key, std::move(target), std::move(options), std::move(done));
  }
  void Cancel(SessionId session) override { inner_->Cancel(session); }

 private:
  const Shifted shifted_;
  std::unique_ptr<transport::Transport> inner_ = transport::ShmTransport::Create({.threads = 1});
};

struct Case {
  const char* name;
  Shifted shifted;
  Proof proof;
};

class AgentReadback : public AgentFixture, public ::testing::WithParamInterface<Case> {
 protected:
  ~AgentReadback() override {
    sources.clear();
    targets.clear();
    agent.reset();
    local.reset();
  }
  std::unique_ptr<transport::Transport> MakeLocal() override {
    return std::make_unique<ShiftingTransport>(GetParam().shifted);
  }
};

TEST_P(AgentReadback, RefusesACopyThatIsOneRowOff) {
  AddSource(0, 2, Rows(0, 32));
  AddSource(1, 2, Rows(32, 64));
  AddTarget(0, 1, Columns(0, 24)).AddAlias();
  ConnectAll(FlipMode::kShadow, GetParam().proof);
  PublishAll(1);
  const wire::Updated updated = UpdateAll()[0];
  EXPECT_THAT(updated.status, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
  for (const char* part : {"w[32:64, 0:24]", "policy/trainer rank 1", "policy/engine replica 0"}) {
    EXPECT_NE(updated.status.message().find(part), std::string::npos) << updated.status;
  }
  EXPECT_EQ(updated.version, Version{0});
  EXPECT_EQ(targets[0]->At(0, 0), 0.0F) << "live memory is as it was";
}

INSTANTIATE_TEST_SUITE_P(
    Copies, AgentReadback,
    ::testing::Values(Case{"Blocks", Shifted::kBlocks, Proof::kReadback},
                      Case{"BlocksInMemoryProof", Shifted::kBlocks, Proof::kMemory},
                      Case{"Aliases", Shifted::kAliases, Proof::kReadback}),
    [](const ::testing::TestParamInfo<Case>& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace tensorbus::agent
