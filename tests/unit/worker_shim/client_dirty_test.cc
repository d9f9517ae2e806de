#include <array>
#include <functional>
#include <gtest/gtest.h>
#include <memory>

#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_shim/one_vector.h"
#include "worker_shim/client.h"

// A consumer whose agent goes away while it may be writing the served memory.
namespace tensorbus::worker_shim {
namespace {

using tensorbus::testing::FakeAgent;
using tensorbus::testing::IsStatus;
using wire::MessageType;

constexpr Nanos kPatience = std::chrono::seconds(10);

class ClientDirty : public ::testing::Test {
 protected:
  void Start(MemoryMode mode = MemoryMode::kMapped) {
    agent_.Play([this, mode] {
      agent_.AcceptAndWelcome();
      registered_ = agent_.TakeRegistration(mode);
    });
    auto client = Client::Connect(OptionsOf(agent_, "engine", Role::kConsumer));
    ASSERT_OK(client);
    client_ = *std::move(client);
    ASSERT_OK(client_->Attach({reinterpret_cast<std::byte*>(memory_.data()), sizeof memory_, -1}));
    ASSERT_OK(client_->Register(OneVector(), kPatience));
    agent_.Join();
    EXPECT_FALSE(registered_.dirty);
    agent_.page().live_version.store(4);
  }

  RequestId Update() {
    auto request = client_->Update(wire::Update());
    EXPECT_OK(request);
    return *request;
  }
  Outcome Wait(RequestId request) {
    auto outcome = client_->Wait(request, kPatience);
    EXPECT_OK(outcome);
    return outcome.ok() ? *std::move(outcome) : Outcome();
  }

  // The agent's part.
  void Hook(MessageType type) {
    agent_.Send(type, 70,
                wire::HookEvent{.session = SessionId{1}, .version = Version{5}, .timeout_ms = 9});
    agent_.Next(MessageType::kHookDone);
  }
  void Answer(const wire::Frame& update, Status status) {
    wire::Updated updated;
    updated.version = Version{4};
    updated.status = std::move(status);
    agent_.Send(MessageType::kUpdated, update.request, updated);
  }
  static Status Dirty() {
    return {Code::kFailedPrecondition, "a mixture of two versions", Reason::kDirty};
  }
  static Status Lost() { return {Code::kUnavailable, "a source left", Reason::kPeerLost}; }

  /// An update that is under way when the agent goes: `script` is what the agent did until then.
  Outcome UpdateUntilTheEnd(const std::function<void(const wire::Frame& update)>& script) {
    const RequestId update = Update();
    agent_.Play([this, &script] {
      script(agent_.Next(MessageType::kUpdate));
      agent_.Close();
    });
    Outcome outcome = Wait(update);
    agent_.Join();
    // What was answered in time says nothing of the end.
    while (client_->Poll().ok()) {
    }
    return outcome;
  }
  /// Whether the client registers as dirty with the next agent.
  bool DirtyAtTheNext() {
    agent_.Play([this] {
      agent_.AcceptAndWelcome();
      registered_ = agent_.TakeRegistration();
    });
    EXPECT_OK(client_->Reconnect(kPatience));
    agent_.Join();
    return registered_.dirty;
  }

  FakeAgent agent_;
  std::array<float, 16> memory_ = {};
  wire::Register registered_;
  std::unique_ptr<Client> client_;
};

TEST_F(ClientDirty, WhenTheAgentGoesAfterAHookThatLetItWrite) {
  for (const MessageType hook : {MessageType::kFence, MessageType::kFlipBegin}) {
    for (const MemoryMode mode : {MemoryMode::kMapped, MemoryMode::kCma}) {
      SCOPED_TRACE(static_cast<int>(hook));
      Start(mode);
      auto claim = client_->Claim();
      ASSERT_OK(claim);
      agent_.Next(MessageType::kClaim);
      const Outcome updated = UpdateUntilTheEnd([&](const wire::Frame&) { Hook(hook); });
      EXPECT_THAT(updated.status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
      EXPECT_THAT(updated.status.message(),
                  ::testing::HasSubstr("policy/engine replica 0 rank 1 of 2"));
      EXPECT_THAT(Wait(*claim).status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
      EXPECT_THAT(client_->connection(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
      EXPECT_EQ(client_->live_version(), Version{});
      EXPECT_TRUE(DirtyAtTheNext());
      EXPECT_EQ(client_->live_version(), Version{}) << "registering repairs nothing";
    }
  }
}

TEST_F(ClientDirty, NotWhenTheAgentGoesBeforeTheHook) {
  Start();
  const Outcome updated = UpdateUntilTheEnd([](const wire::Frame&) {});
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(client_->live_version(), Version{4});
  EXPECT_FALSE(DirtyAtTheNext());
}

TEST_F(ClientDirty, NotWhenTheHookLetsNobodyWrite) {
  Start();
  client_->SetHook([](HookKind, const wire::HookEvent&) {
    return Status(Code::kAborted, "the engine does not stop");
  });
  const Outcome updated =
      UpdateUntilTheEnd([this](const wire::Frame&) { Hook(MessageType::kFence); });
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_FALSE(DirtyAtTheNext());
}

TEST_F(ClientDirty, NotWhenTheAgentGoesWhileTheHookRuns) {
  Start();
  client_->SetHook([this](HookKind, const wire::HookEvent&) {
    agent_.Join();
    return Status();
  });
  const Outcome updated = UpdateUntilTheEnd(
      [this](const wire::Frame&) { agent_.Send(MessageType::kFence, 70, wire::HookEvent()); });
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(client_->live_version(), Version{4});
  EXPECT_FALSE(DirtyAtTheNext());
}

// Every byte goes through the worker then.
TEST_F(ClientDirty, WithBucketsOnlyWhenOneWasUnpacked) {
  for (const bool unpacked : {false, true}) {
    Start(MemoryMode::kBucket);
    const Outcome updated = UpdateUntilTheEnd([&](const wire::Frame&) {
      Hook(MessageType::kFence);
      agent_.Send(unpacked ? MessageType::kUnpack : MessageType::kPack, 71, wire::BucketWork());
      agent_.Next(MessageType::kBucketDone);
    });
    EXPECT_EQ(updated.status.reason(), unpacked ? Reason::kDirty : Reason::kPeerLost);
    EXPECT_EQ(client_->live_version(), Version{unpacked ? 0U : 4U});
    EXPECT_EQ(DirtyAtTheNext(), unpacked);
  }
}

TEST_F(ClientDirty, NotOnceTheVersionIsLive) {
  Start();
  const Outcome updated = UpdateUntilTheEnd([this](const wire::Frame&) {
    Hook(MessageType::kFence);
    agent_.page().live_version.store(5);
    Hook(MessageType::kLive);
  });
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(client_->live_version(), Version{5});
  EXPECT_FALSE(DirtyAtTheNext());
}

TEST_F(ClientDirty, NotWhenTheAgentSaidThatItWroteNothing) {
  Start();
  const Outcome updated = UpdateUntilTheEnd([this](const wire::Frame& update) {
    Hook(MessageType::kFlipBegin);
    Answer(update, Lost());
  });
  EXPECT_THAT(updated.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(client_->live_version(), Version{4});
  EXPECT_FALSE(DirtyAtTheNext());
}

TEST_F(ClientDirty, RemembersWhatTheAgentSaidUntilAVersionIsLive) {
  Start();
  const Outcome failed = UpdateUntilTheEnd([this](const wire::Frame& update) {
    Hook(MessageType::kFence);
    Answer(update, Dirty());
  });
  EXPECT_THAT(failed.status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  EXPECT_EQ(client_->live_version(), Version{});
  EXPECT_TRUE(DirtyAtTheNext());
  // This one goes before it has begun to repair anything.
  const Outcome again = UpdateUntilTheEnd([](const wire::Frame&) {});
  EXPECT_THAT(again.status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  EXPECT_TRUE(DirtyAtTheNext());
  const Outcome repaired = UpdateUntilTheEnd([this](const wire::Frame& update) {
    Hook(MessageType::kFence);
    agent_.page().live_version.store(5);
    Hook(MessageType::kLive);
    Answer(update, {});
  });
  EXPECT_OK(repaired.status);
  EXPECT_EQ(client_->live_version(), Version{5});
  EXPECT_FALSE(DirtyAtTheNext());
}

TEST_F(ClientDirty, UntilAClaimProvesWhatTheMemoryIs) {
  Start();
  UpdateUntilTheEnd([this](const wire::Frame&) { Hook(MessageType::kFence); });
  ASSERT_TRUE(DirtyAtTheNext());
  for (const bool proved : {false, true}) {
    auto claim = client_->Claim();
    ASSERT_OK(claim);
    agent_.Play([this, proved] {
      wire::Claimed answer;
      if (!proved) answer.status = Status(Code::kNotFound, "", Reason::kChecksumMismatch);
      agent_.page().live_version.store(proved ? 4 : 0);
      agent_.Send(MessageType::kClaimed, agent_.Next(MessageType::kClaim).request, answer);
    });
    Wait(*claim);
    agent_.Join();
    EXPECT_EQ(client_->live_version(), Version{proved ? 4U : 0U});
    agent_.Close();
    EXPECT_EQ(DirtyAtTheNext(), !proved);
  }
}

TEST_F(ClientDirty, WhenNobodyLooksUntilItConnectsAgain) {
  Start();
  const RequestId update = Update();
  agent_.Next(MessageType::kUpdate);
  agent_.Send(MessageType::kFence, 70, wire::HookEvent());
  ASSERT_OK(client_->Poll());
  agent_.Next(MessageType::kHookDone);
  agent_.Close();
  EXPECT_TRUE(DirtyAtTheNext());
  EXPECT_THAT(Wait(update).status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
}

TEST_F(ClientDirty, TheRefusalOfAnotherUpdateEndsNothing) {
  Start();
  const RequestId first = Update();
  agent_.Next(MessageType::kUpdate);
  const Outcome updated = UpdateUntilTheEnd([this](const wire::Frame& refused) {
    Hook(MessageType::kFence);
    Answer(refused, Status(Code::kFailedPrecondition, "asked already", Reason::kBusy));
  });
  EXPECT_EQ(updated.status.reason(), Reason::kBusy);
  EXPECT_THAT(Wait(first).status, IsStatus(Code::kFailedPrecondition, Reason::kDirty));
  EXPECT_TRUE(DirtyAtTheNext());
}

TEST_F(ClientDirty, WhenItRegistersAnewAfterTheAgentMayHaveWrittenUnasked) {
  Start();
  agent_.Send(MessageType::kFence, 70, wire::HookEvent());
  ASSERT_OK(client_->Poll());
  agent_.Next(MessageType::kHookDone);
  agent_.Play([this] { registered_ = agent_.TakeRegistration(); });
  ASSERT_OK(client_->Register(OneVector(), kPatience));
  agent_.Join();
  EXPECT_TRUE(registered_.dirty);
}

}  // namespace
}  // namespace tensorbus::worker_shim
