#pragma once

#include <filesystem>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <memory>
#include <unistd.h>
#include <vector>

#include "agent/agent.h"
#include "tensorbus/transport/shm_transport.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/agent/fake_daemon.h"
#include "tests/unit/agent/fake_worker.h"

namespace tensorbus::testing {

/// One agent in this process with fake daemon and fake workers around it. The tensor is "w",
/// f32 [64, 24], unless a test registers others.
class AgentFixture : public ::testing::Test {
 protected:
  AgentFixture() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tb-agent-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  void SetUp() override { Restart(); }
  ~AgentFixture() override {
    sources.clear();
    targets.clear();
    agent.reset();
    local.reset();
    std::filesystem::remove_all(folder_);
  }

  static Shape WeightShape() {
    const std::array<std::uint64_t, 2> dims = {64, 24};
    return *Shape::Create(dims);
  }
  static Box BoxOf(Range rows, Range columns) {
    const std::array<Range, 2> ranges = {rows, columns};
    return Box(ranges);
  }
  static Box Rows(std::uint64_t lo, std::uint64_t hi) { return BoxOf({lo, hi}, {0, 24}); }
  static Box Columns(std::uint64_t lo, std::uint64_t hi) { return BoxOf({0, 64}, {lo, hi}); }

  /// The transport between the agent's own ranks.
  virtual std::unique_ptr<transport::Transport> MakeLocal() {
    return transport::ShmTransport::Create({.threads = 2});
  }

  void Restart() {
    sources.clear();
    targets.clear();
    agent.reset();
    daemon.Crash(/*accept_again=*/true);
    local = MakeLocal();
    agent::AgentOptions options;
    options.name = "agent-a";
    options.host = "host-a";
    options.workers.socket_path = folder_ + "/agent.sock";
    options.daemon_target = "fake-target";
    options.trace_folder = folder_ + "/traces";
    options.daemon_retry_min = std::chrono::milliseconds(5);
    options.daemon_retry_max = std::chrono::milliseconds(20);
    agent::AgentParts parts;
    parts.local = local.get();
    parts.open_link = daemon.Factory();
    metrics = std::make_unique<Metrics>();
    parts.metrics = metrics.get();
    parts.staging = staging = transport::StagingBudget::Create(staging_bytes);
    options.bucket_patience = bucket_patience;
    options.daemon_wait = daemon_wait;
    options.register_wait = register_wait;
    options.publish_wait = publish_wait;
    options.claim_wait = claim_wait;
    auto made = agent::Agent::Create(std::move(options), std::move(parts));
    ASSERT_OK(made);
    agent = *std::move(made);
  }

  FakeWorker& AddSource(std::uint32_t rank, std::uint32_t rank_count, const Box& box) {
    sources.push_back(
        std::make_unique<FakeWorker>(agent->socket_path(), RankIdentity{.channel = "policy",
                                                                        .job = "trainer",
                                                                        .role = Role::kProducer,
                                                                        .replica = 0,
                                                                        .rank = rank,
                                                                        .rank_count = rank_count}));
    sources.back()->AddTensor("w", WeightShape(), box);
    return *sources.back();
  }
  FakeWorker& AddTarget(std::uint32_t rank, std::uint32_t rank_count, const Box& box) {
    targets.push_back(
        std::make_unique<FakeWorker>(agent->socket_path(), RankIdentity{.channel = "policy",
                                                                        .job = "engine",
                                                                        .role = Role::kConsumer,
                                                                        .replica = 0,
                                                                        .rank = rank,
                                                                        .rank_count = rank_count}));
    targets.back()->AddTensor("w", WeightShape(), box);
    return *targets.back();
  }
  void ConnectAll(FlipMode flip, Proof proof = Proof::kReadback) {
    for (auto& source : sources) {
      ASSERT_OK(source->Connect());
      ASSERT_OK(source->Register());
    }
    for (auto& target : targets) {
      ASSERT_OK(target->Connect());
      ASSERT_OK(target->Register(flip, proof));
    }
  }
  /// Two sources by rows, two targets by columns.
  void StartPair(FlipMode flip, Proof proof = Proof::kReadback) {
    AddSource(0, 2, Rows(0, 32));
    AddSource(1, 2, Rows(32, 64));
    AddTarget(0, 2, Columns(0, 12));
    AddTarget(1, 2, Columns(12, 24));
    ConnectAll(flip, proof);
  }

  void PublishAll(std::uint32_t version, wire::SlowConsumer policy = wire::SlowConsumer::kWait,
                  bool receipts = false) {
    for (auto& source : sources) source->Fill(version);
    for (auto& source : sources) ASSERT_OK(source->Publish(version, policy, receipts));
  }
  std::vector<std::uint64_t> StartUpdateAll() {
    std::vector<std::uint64_t> requests;
    for (auto& target : targets) requests.push_back(target->StartUpdate());
    return requests;
  }
  std::vector<wire::Updated> AwaitAll(const std::vector<std::uint64_t>& requests) {
    std::vector<wire::Updated> out;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      out.push_back(targets[i]->AwaitUpdate(requests[i]));
    }
    return out;
  }
  std::vector<wire::Updated> UpdateAll() { return AwaitAll(StartUpdateAll()); }

  void Hold(FakeDaemon::Step step) {
    daemon.SetOnStep([step](FakeDaemon::Step at, SessionId) { return at != step; });
  }
  void ReleaseHeld() {
    daemon.SetOnStep(nullptr);
    daemon.Release();
  }

  std::string folder_;
  std::uint64_t staging_bytes = transport::StagingBudget::kDefaultBytes;  ///< before Restart()
  Nanos bucket_patience = std::chrono::seconds(20);                       ///< before Restart()
  Nanos daemon_wait = std::chrono::seconds(10);                           ///< before Restart()
  Nanos register_wait = std::chrono::minutes(12);                         ///< before Restart()
  std::shared_ptr<transport::StagingBudget> staging;
  Nanos publish_wait = std::chrono::minutes(1);  ///< before Restart()
  Nanos claim_wait = std::chrono::minutes(12);   ///< before Restart()
  FakeDaemon daemon;
  std::unique_ptr<Metrics> metrics;
  std::unique_ptr<transport::Transport> local;
  std::unique_ptr<agent::Agent> agent;
  std::vector<std::unique_ptr<FakeWorker>> sources;
  std::vector<std::unique_ptr<FakeWorker>> targets;
};

}  // namespace tensorbus::testing
