#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tensorbus/client/client.h"
#include "tensorbus/rpc/admin_client.h"
#include "tests/integration/agent_bus.h"

// An engine's agent is killed while it may be writing the memory that the engine serves.
namespace tensorbus {
namespace {

using std::chrono::milliseconds;
using testing::BoxOf;
using testing::Engine;
using testing::FakeWorker;
using testing::IsStatus;
using testing::PublishAll;
using testing::Trainer;

class AgentKilled : public testing::AgentBus {
 protected:
  void TearDown() override {
    request_.reset();
    engine_.reset();
    AgentBus::TearDown();
  }

  /// Rank 0 of `rank_count` of the engine, at agent "b", through the public library: all rows of
  /// these columns.
  void AddEngine(std::uint32_t rank_count, Range columns, FlipMode flip) {
    client::ConnectOptions connect;
    connect.identity = Engine(0, 0, rank_count);
    connect.agent_socket = dir_.Join("b.sock");
    ASSERT_OK(OnceItListens([&] {
      auto client = client::Client::Connect(connect);
      if (client.ok()) engine_ = std::make_unique<client::Client>(*std::move(client));
      return client.status();
    }));
    const std::uint64_t width = columns.size();
    auto arena = client::Arena::Create(kRows * width * sizeof(float));
    ASSERT_OK(arena);
    auto memory = arena->Allocate(kRows * width * sizeof(float));
    ASSERT_OK(memory);
    memory_ = {reinterpret_cast<const float*>(memory->data()), kRows * width};
    ASSERT_OK(engine_->Attach(*arena));
    engine_->SetHook([this](const client::HookEvent& event) {
      last_hook_ = event.kind;
      return Status();
    });
    const std::array<std::uint64_t, 2> dims = {kRows, kColumns};
    client::RegisterOptions options;
    options.tensors = {{"w", DType::kF32, *Shape::Create(dims)}};
    Piece piece;
    piece.box = BoxOf({0, kRows}, columns);
    piece.strides = {width * sizeof(float), sizeof(float)};
    options.pieces = {piece};
    options.flip = flip;
    ASSERT_OK(engine_->Register(options));
    columns_ = columns;
  }

  void StartUpdate() {
    auto request = engine_->Update({.timeout = kPatience});
    ASSERT_OK(request);
    request_ = std::make_unique<client::Request>(*std::move(request));
  }
  Status AwaitUpdate() { return request_->Wait(kPatience).status(); }
  /// Answers hooks until `reached`; the update may not end before.
  ::testing::AssertionResult ServeUntil(const std::function<bool()>& reached) {
    const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
    while (!reached()) {
      const Status status = request_->Wait(milliseconds(5)).status();
      if (status.code() != Code::kDeadlineExceeded || request_->done()) {
        return ::testing::AssertionFailure() << "the update ended: " << status;
      }
      if (std::chrono::steady_clock::now() > deadline) {
        return ::testing::AssertionFailure() << "did not get there in time";
      }
    }
    return ::testing::AssertionSuccess();
  }

  /// Whether the engine's rows of `source` are what that source's memory is now.
  bool HoldsRowsOf(FakeWorker& source) const {
    const Range rows = source.registration.pieces[0].box[0];
    const std::uint64_t width = columns_.size();
    for (std::uint64_t row = rows.lo; row < rows.hi; ++row) {
      const float* const want = &source.At(0, (row - rows.lo) * kColumns + columns_.lo);
      if (std::memcmp(&memory_[row * width], want, width * sizeof(float)) != 0) return false;
    }
    return true;
  }

  proto::ReplicaStatus Replica() {
    const auto admin =
        rpc::AdminClient::Create({.target = "unix:" + dir_.Join("daemon.sock")}, kPatience);
    EXPECT_OK(admin);
    const auto status = (*admin)->GetStatus({});
    EXPECT_OK(status);
    return status->channels(0).replicas(0);
  }

  std::unique_ptr<client::Client> engine_;
  std::unique_ptr<client::Request> request_;
  std::span<const float> memory_;
  Range columns_;
  client::HookKind last_hook_ = client::HookKind::kLive;
};

TEST_F(AgentKilled, InTheMiddleOfACopyLeavesTheEngineDirtyUntilAnUpdateRepairsIt) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  StartAgent("c");  // so that nothing waits behind what never comes
  FakeWorker& first = Add("a", Trainer(0, 2), BoxOf({0, 512}, {0, kColumns}));
  FakeWorker& second = Add("c", Trainer(1, 2), BoxOf({512, kRows}, {0, kColumns}),
                           FlipMode::kInPlace, Proof::kReadback, /*private_mode=*/3);
  ASSERT_NO_FATAL_FAILURE(AddEngine(1, {0, kColumns}, FlipMode::kInPlace));
  ASSERT_NO_FATAL_FAILURE(PublishAll({&first, &second}, 1));
  ASSERT_NO_FATAL_FAILURE(StartUpdate());
  ASSERT_OK(AwaitUpdate());
  ASSERT_EQ(engine_->live_version(), Version{1});

  // The first source's bytes arrive, those of the second stay where they are.
  ASSERT_NO_FATAL_FAILURE(PublishAll({&first, &second}, 2));
  second.ServeBuckets(false);
  ASSERT_NO_FATAL_FAILURE(StartUpdate());
  ASSERT_TRUE(ServeUntil([&] { return HoldsRowsOf(first); }));
  ASSERT_FALSE(HoldsRowsOf(second)) << "not a mixture";
  agents_[1]->Kill(SIGKILL);
  EXPECT_THAT(AwaitUpdate(), IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  EXPECT_EQ(engine_->live_version(), Version{});
  EXPECT_THAT(engine_->connection(), IsStatus(Code::kUnavailable, Reason::kPeerLost));

  second.ServeBuckets(true);
  StartAgent("b");
  ASSERT_OK(OnceItListens([this] { return engine_->Reconnect(kPatience); }));
  EXPECT_EQ(Replica().state(), "dirty");
  EXPECT_EQ(engine_->live_version(), Version{});
  ASSERT_NO_FATAL_FAILURE(StartUpdate());
  ASSERT_OK(AwaitUpdate());
  EXPECT_EQ(engine_->live_version(), Version{2});
  EXPECT_TRUE(HoldsRowsOf(first));
  EXPECT_TRUE(HoldsRowsOf(second));
  EXPECT_EQ(Replica().state(), "idle");
}

TEST_F(AgentKilled, WhenTheFlipMayHaveBegunMakesTheWholeReplicaDirty) {
  StartDaemon();
  StartAgent("a");
  StartAgent("b");
  FakeWorker& source = Add("a", Trainer(0, 1), BoxOf({0, kRows}, {0, kColumns}));
  FakeWorker& other =
      Add("a", Engine(0, 1, 2), BoxOf({0, kRows}, {256, kColumns}), FlipMode::kShadow);
  ASSERT_NO_FATAL_FAILURE(AddEngine(2, {0, 256}, FlipMode::kShadow));
  const auto update_both = [&] {
    ASSERT_NO_FATAL_FAILURE(StartUpdate());
    const std::uint64_t asked = other.StartUpdate();
    ASSERT_OK(AwaitUpdate());
    ASSERT_OK(other.AwaitUpdate(asked).status);
  };
  ASSERT_NO_FATAL_FAILURE(PublishAll({&source}, 1));
  ASSERT_NO_FATAL_FAILURE(update_both());

  // The other rank does not stop: nobody is told to flip. This rank cannot know.
  std::atomic<bool> stopped{false};
  other.SetHook([&stopped](wire::MessageType) {
    stopped.wait(false);
    return Status();
  });
  ASSERT_NO_FATAL_FAILURE(PublishAll({&source}, 2));
  const std::uint64_t asked = other.StartUpdate();
  ASSERT_NO_FATAL_FAILURE(StartUpdate());
  const bool asked_to_stop =
      ServeUntil([this] { return last_hook_ == client::HookKind::kFlipBegin; });
  agents_[1]->Kill(SIGKILL);
  const bool missed = Soon([this] { return Replica().ranks_size() == 1; });
  stopped = true;
  stopped.notify_all();
  ASSERT_TRUE(asked_to_stop);
  ASSERT_TRUE(missed);
  EXPECT_THAT(AwaitUpdate(), IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  EXPECT_EQ(engine_->live_version(), Version{});
  EXPECT_THAT(other.AwaitUpdate(asked).status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(other.CountWrong(1), 0U) << "its agent says that it is clean, and it is";

  StartAgent("b");
  ASSERT_OK(OnceItListens([this] { return engine_->Reconnect(kPatience); }));
  const proto::ReplicaStatus replica = Replica();
  EXPECT_EQ(replica.state(), "dirty");
  ASSERT_EQ(replica.ranks_size(), 2);
  EXPECT_TRUE(replica.ranks(0).dirty());
  EXPECT_FALSE(replica.ranks(1).dirty());
  ASSERT_NO_FATAL_FAILURE(update_both());
  EXPECT_EQ(engine_->live_version(), Version{2});
  EXPECT_TRUE(HoldsRowsOf(source));
  EXPECT_EQ(other.CountWrong(2), 0U);
  EXPECT_EQ(Replica().state(), "idle");
}

}  // namespace
}  // namespace tensorbus
