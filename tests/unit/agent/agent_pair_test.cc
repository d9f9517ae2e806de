#include <gtest/gtest.h>
#include <sys/resource.h>

#include "tensorbus/transport/tcp_transport.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent/agent_fixture.h"
#include "tests/unit/agent/bus_ranks.h"

// Two agents with their own ranks: what crosses over goes by tcp, what stays goes by shm.
namespace tensorbus::agent {
namespace {

using testing::BoxOf;
using testing::Engine;
using testing::FakeDaemon;
using testing::FakeWorker;
using testing::IsStatus;
using testing::Trainer;

class AgentPair : public ::testing::Test {
 protected:
  struct Node {
    std::unique_ptr<transport::Transport> local;
    std::unique_ptr<transport::TcpTransport> remote;
    std::unique_ptr<Agent> agent;
  };

  void SetUp() override {
    for (const char* name : {"a", "b"}) {
      auto node = std::make_unique<Node>();
      node->local = transport::ShmTransport::Create({.threads = 1});
      transport::TcpOptions tcp;
      tcp.token_source = [this] { return token_; };
      tcp.io_threads = 1;
      auto remote = transport::TcpTransport::Create(std::move(tcp));
      ASSERT_OK(remote);
      node->remote = *std::move(remote);
      AgentOptions options;
      options.name = std::string("agent-") + name;
      options.host = std::string("host-") + name;
      options.workers.socket_path = dir_.Join(std::string(name) + ".sock");
      options.daemon_target = "fake-target";
      AgentParts parts;
      parts.local = node->local.get();
      parts.remote = node->remote.get();
      parts.open_link = daemon_.Factory();
      auto agent = Agent::Create(std::move(options), std::move(parts));
      ASSERT_OK(agent);
      node->agent = *std::move(agent);
      nodes_.push_back(std::move(node));
    }
  }
  void TearDown() override {
    workers_.clear();
    nodes_.clear();
  }

  FakeWorker& Add(std::size_t node, RankIdentity identity, const Box& box, FlipMode flip) {
    workers_.push_back(std::make_unique<FakeWorker>(nodes_[node]->agent->socket_path(), identity));
    FakeWorker& worker = *workers_.back();
    const std::array<std::uint64_t, 2> dims = {64, 48};
    worker.AddTensor("w", *Shape::Create(dims), box);
    EXPECT_OK(worker.Connect());
    EXPECT_OK(worker.Register(flip));
    return worker;
  }

  testing::TempDir dir_;
  const std::string token_ = "a token of tests";
  FakeDaemon daemon_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::unique_ptr<FakeWorker>> workers_;
};

TEST_F(AgentPair, ALocalAndARemoteReplicaTakeOneVersion) {
  FakeWorker& t0 = Add(0, Trainer(0, 2), BoxOf({0, 32}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& t1 = Add(1, Trainer(1, 2), BoxOf({32, 64}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& near = Add(0, Engine(0, 0, 1), BoxOf({0, 64}, {0, 48}), FlipMode::kShadow);
  FakeWorker& far0 = Add(1, Engine(1, 0, 2), BoxOf({0, 64}, {0, 24}), FlipMode::kInPlace);
  FakeWorker& far1 = Add(0, Engine(1, 1, 2), BoxOf({0, 64}, {24, 48}), FlipMode::kInPlace);
  for (std::uint32_t version = 1; version <= 3; ++version) {
    t0.Fill(version);
    t1.Fill(version);
    ASSERT_OK(t0.Publish(version));
    ASSERT_OK(t1.Publish(version));
    const auto a = near.StartUpdate();
    const auto b = far0.StartUpdate();
    const auto c = far1.StartUpdate();
    ASSERT_OK(near.AwaitUpdate(a).status);
    ASSERT_OK(far0.AwaitUpdate(b).status);
    ASSERT_OK(far1.AwaitUpdate(c).status);
    EXPECT_EQ(near.CountWrong(version), 0U);
    EXPECT_EQ(far0.CountWrong(version), 0U);
    EXPECT_EQ(far1.CountWrong(version), 0U);
    daemon_.set_early_go(true);  // from the second version on, without a round of ready and go
  }
}

TEST_F(AgentPair, AnAgentThatWasNotToldTheSessionsCapabilityGetsNothing) {
  FakeWorker& t0 = Add(0, Trainer(0, 2), BoxOf({0, 32}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& t1 = Add(0, Trainer(1, 2), BoxOf({32, 64}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& engine = Add(1, Engine(0, 0, 1), BoxOf({0, 64}, {0, 48}), FlipMode::kShadow);
  daemon_.set_split_capability(true);
  for (std::uint32_t version = 1; version <= 2; ++version) {
    t0.Fill(version);
    t1.Fill(version);
    ASSERT_OK(t0.Publish(version));
    ASSERT_OK(t1.Publish(version));
    const auto updated = engine.AwaitUpdate(engine.StartUpdate());
    if (version == 1) {
      EXPECT_EQ(updated.status.code(), Code::kPermissionDenied) << updated.status;
      EXPECT_NE(updated.status.message().find("policy/trainer rank"), std::string::npos)
          << updated.status;
    } else {
      EXPECT_OK(updated.status);
    }
    daemon_.set_split_capability(false);
  }
  EXPECT_EQ(engine.CountWrong(2), 0U);
}

TEST_F(AgentPair, ASourceAgentThatDiesFailsTheSessionInTime) {
  FakeWorker& t0 = Add(0, Trainer(0, 2), BoxOf({0, 32}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& t1 = Add(1, Trainer(1, 2), BoxOf({32, 64}, {0, 48}), FlipMode::kInPlace);
  FakeWorker& engine = Add(0, Engine(0, 0, 1), BoxOf({0, 64}, {0, 48}), FlipMode::kShadow);
  t0.Fill(1);
  t1.Fill(1);
  ASSERT_OK(t0.Publish(1));
  ASSERT_OK(t1.Publish(1));
  daemon_.SetOnStep([](FakeDaemon::Step step, SessionId) { return step != FakeDaemon::Step::kGo; });
  const auto request = engine.StartUpdate();
  ASSERT_TRUE(daemon_.AwaitReceived(proto::AgentMessage::kSessionReady, 2));
  nodes_[1]->agent->Stop();
  const auto updated = engine.AwaitUpdate(request);
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_NE(updated.status.message().find("rank 1"), std::string::npos) << updated.status;
}

}  // namespace
}  // namespace tensorbus::agent
