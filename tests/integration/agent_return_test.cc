#include <array>
#include <chrono>
#include <csignal>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <vector>

#include "tensorbus/client/client.h"
#include "tests/integration/agent_bus.h"

// The daemon, or a trainer's agent, is killed while a version is published that nobody has brought.
namespace tensorbus {
namespace {

using testing::AgentBus;
using testing::BoxOf;
using testing::Engine;
using testing::FakeWorker;
using testing::IsStatus;
using testing::PublishAll;
using testing::Trainer;
using testing::UpdateAll;

/// Longer than a daemon that has restarted waits for engines to come back.
constexpr std::uint64_t kSettledMs = 20000;

TEST_F(AgentBus, AVersionThatNobodyHasBroughtOutlivesTheDaemon) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  std::vector<FakeWorker*> sources = {&Add("a", Trainer(0, 2), BoxOf({0, 512}, {0, kColumns})),
                                      &Add("b", Trainer(1, 2), BoxOf({512, kRows}, {0, kColumns}))};
  FakeWorker& target = Add("a", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_NO_FATAL_FAILURE(PublishAll(sources, 1));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 1));
  ASSERT_NO_FATAL_FAILURE(PublishAll(sources, 2));
  daemon_->Kill(SIGKILL);
  StartDaemon();
  for (FakeWorker* const source : sources) {
    EXPECT_EQ(source->Release(2, 1000).status.code(), Code::kDeadlineExceeded);
    EXPECT_LT(source->page().released_version.load(), 2U) << "nobody has brought it";
  }
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 2));
  for (FakeWorker* const source : sources) ASSERT_OK(source->Release(2, kSettledMs).status);
  ASSERT_NO_FATAL_FAILURE(PublishAll(sources, 3));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 3));
}

/// A trainer of one rank at agent "a", through the public library, that holds all of "w".
class TrainerReturn : public testing::AgentBus {
 protected:
  void TearDown() override {
    trainer_.reset();
    AgentBus::TearDown();
  }
  void StartTrainer() {
    client::ConnectOptions connect;
    connect.identity = Trainer(0, 1);
    connect.agent_socket = dir_.Join("a.sock");
    ASSERT_OK(OnceItListens([&] {
      auto client = client::Client::Connect(connect);
      if (client.ok()) trainer_ = std::make_unique<client::Client>(*std::move(client));
      return client.status();
    }));
    auto arena = client::Arena::Create(kRows * kColumns * sizeof(float));
    ASSERT_OK(arena);
    auto memory = arena->Allocate(kRows * kColumns * sizeof(float));
    ASSERT_OK(memory);
    weights_ = {reinterpret_cast<float*>(memory->data()), kRows * kColumns};
    ASSERT_OK(trainer_->Attach(*arena));
    const std::array<std::uint64_t, 2> dims = {kRows, kColumns};
    client::RegisterOptions options;
    options.tensors = {{"w", DType::kF32, *Shape::Create(dims)}};
    Piece piece;
    piece.box = BoxOf({0, kRows}, {0, kColumns});
    piece.strides = {kColumns * sizeof(float), sizeof(float)};
    options.pieces = {piece};
    ASSERT_OK(trainer_->Register(options));
    ASSERT_OK(trainer_->StartService());
  }
  void Write(std::uint32_t version) {
    ASSERT_OK(trainer_->BeforeWrite(kPatience));
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = FakeWorker::ValueAt(i, version);
    }
  }
  void Publish(std::uint32_t version) {
    auto request = trainer_->Publish({.version = Version{version}});
    ASSERT_OK(request);
    ASSERT_OK(request->Wait(kPatience));
  }
  void Reconnect() {
    ASSERT_OK(OnceItListens([this] { return trainer_->Reconnect(kPatience); }));
  }

  std::span<float> weights_;
  std::unique_ptr<client::Client> trainer_;
};

TEST_F(TrainerReturn, AVersionThatNobodyHasBroughtOutlivesTheTrainersAgent) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  ASSERT_NO_FATAL_FAILURE(StartTrainer());
  FakeWorker& target = Add("b", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  for (const std::uint32_t version : {1U, 2U}) {
    ASSERT_NO_FATAL_FAILURE(Write(version));
    ASSERT_NO_FATAL_FAILURE(Publish(version));
    if (version == 2) break;
    ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 1));
  }
  agents_[0]->Kill(SIGKILL);
  StartAgent("a");
  ASSERT_NO_FATAL_FAILURE(Reconnect());
  EXPECT_EQ(trainer_->BeforeWrite(std::chrono::seconds(1)).status().code(), Code::kDeadlineExceeded)
      << "nobody has brought it";
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 2));
  ASSERT_NO_FATAL_FAILURE(Write(3));
  ASSERT_NO_FATAL_FAILURE(Publish(3));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 3));
}

TEST_F(TrainerReturn, AVersionOutlivesDaemonAndAgentTogether) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  ASSERT_NO_FATAL_FAILURE(StartTrainer());
  FakeWorker& target = Add("b", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_NO_FATAL_FAILURE(Write(1));
  ASSERT_NO_FATAL_FAILURE(Publish(1));
  daemon_->Kill(SIGKILL);
  agents_[0]->Kill(SIGKILL);
  StartDaemon();
  StartAgent("a");
  ASSERT_NO_FATAL_FAILURE(Reconnect());
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 1));
}

TEST_F(TrainerReturn, ATrainerWhosePlaceIsTakenHearsThatFromItsAgent) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  ASSERT_NO_FATAL_FAILURE(StartTrainer());
  // The next daemon hears of another trainer first.
  ::kill(agents_[0]->pid(), SIGSTOP);
  daemon_->Kill(SIGKILL);
  StartDaemon();
  RankIdentity other = Trainer(0, 1);
  other.job = "usurper";
  Add("b", other, BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_OK(trainer_->connection());
  ::kill(agents_[0]->pid(), SIGCONT);
  ASSERT_TRUE(Soon([this] { return !trainer_->connection().ok(); }));
  const Status why = trainer_->Publish({.version = Version{1}}).status();
  EXPECT_THAT(why, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  for (const char* part : {"rank 0 of 1 was broken off", "registering again", "usurper"}) {
    EXPECT_NE(why.message().find(part), std::string::npos) << why;
  }
}

TEST_F(TrainerReturn, WhatATrainerWroteWithoutItsAgentIsNobodysVersion) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  ASSERT_NO_FATAL_FAILURE(StartTrainer());
  FakeWorker& target = Add("b", Engine(0, 0, 1), BoxOf({0, kRows}, {0, kColumns}));
  ASSERT_NO_FATAL_FAILURE(Write(1));
  ASSERT_NO_FATAL_FAILURE(Publish(1));
  agents_[0]->Kill(SIGKILL);
  ASSERT_TRUE(Soon([this] { return !trainer_->connection().ok(); }));
  ASSERT_NO_FATAL_FAILURE(Write(2));
  StartAgent("a");
  ASSERT_NO_FATAL_FAILURE(Reconnect());
  EXPECT_EQ(target.Update(/*timeout_ms=*/500).status.code(), Code::kDeadlineExceeded);
  ASSERT_NO_FATAL_FAILURE(Write(2));
  ASSERT_NO_FATAL_FAILURE(Publish(2));
  ASSERT_NO_FATAL_FAILURE(UpdateAll({&target}, 2));
}

}  // namespace
}  // namespace tensorbus
