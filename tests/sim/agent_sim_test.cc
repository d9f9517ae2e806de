#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensorbus/rpc/protocol.h"
#include "tensorbus/rpc/status_map.h"
#include "tests/sim/world.h"
#include "tests/testing/status_matchers.h"

// Streams that do not begin as they should, and agents that speak of what is not theirs.
namespace tensorbus::sim {
namespace {

using namespace std::chrono_literals;
using daemon::Selector;
using testing::IsStatus;

/// The daemon's side of a stream on which only this test speaks.
struct Stream final : rpc::AgentPort {
  void Send(proto::DaemonMessage message) override {
    if (!message.has_welcome()) return;
    welcomed = rpc::FromProto(message.welcome().error());
  }
  void Close(Status status) override { closed = std::move(status); }
  std::optional<Status> welcomed;
  std::optional<Status> closed;
};

class AgentSim : public ::testing::Test {
 protected:
  rpc::PortId Open(const std::shared_ptr<Stream>& stream) {
    const rpc::PortId port = world_.NextPort();
    world_.core->OnAttach(port, stream, "fd:1");
    return port;
  }
  static proto::AgentMessage Hello(const std::string& name) {
    proto::AgentMessage message;
    message.mutable_hello()->set_protocol(rpc::kControlProtocol);
    message.mutable_hello()->set_agent(name);
    return message;
  }

  World world_;
  std::shared_ptr<Stream> stream_ = std::make_shared<Stream>();
};

TEST_F(AgentSim, EndsAStreamOnWhichNothingIsSaid) {
  Open(stream_);
  world_.executor.Advance(4s);
  EXPECT_FALSE(stream_->closed);
  world_.executor.Advance(2s);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kDeadlineExceeded, Reason::kPeerLost));
}

TEST_F(AgentSim, EndsAStreamThatDoesNotBeginWithOneHello) {
  proto::AgentMessage heartbeat;
  heartbeat.mutable_heartbeat();
  world_.core->OnMessage(Open(stream_), heartbeat);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kFailedPrecondition, Reason::kMalformed));

  stream_ = std::make_shared<Stream>();
  world_.core->OnMessage(Open(stream_), Hello(""));
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));

  stream_ = std::make_shared<Stream>();
  const rpc::PortId port = Open(stream_);
  world_.core->OnMessage(port, Hello("a"));
  EXPECT_FALSE(stream_->closed);
  world_.core->OnMessage(port, Hello("a"));
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kFailedPrecondition, Reason::kMalformed));
  EXPECT_EQ(world_.core->counts().agents, 0U);
}

TEST_F(AgentSim, TwoAgentsOfOneNameDoNotEvictEachOther) {
  FakeAgent& first = world_.AddAgent("a", "host-of-a");
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  for (int attempt = 0; attempt < 3; ++attempt) {
    stream_ = std::make_shared<Stream>();
    const TimePoint asked = world_.executor.Now();
    world_.core->OnMessage(Open(stream_), Hello("a"));
    ASSERT_TRUE(world_.executor.AdvanceUntil([&] { return stream_->closed.has_value(); }, 10s));
    EXPECT_GE(world_.executor.Now() - asked, 2s) << "or it would try again and again";
    EXPECT_LE(world_.executor.Now() - asked, 3s);
    EXPECT_EQ(stream_->welcomed.value().code(), Code::kAlreadyExists);
    for (const char* part : {"'a'", "host-of-a", "4711", "--name"}) {
      EXPECT_THAT(stream_->closed.value().message(), ::testing::HasSubstr(part));
    }
  }
  EXPECT_TRUE(first.attached());
  EXPECT_EQ(world_.core->counts().agents, 1U);
  EXPECT_EQ(world_.core->counts().ranks, 1U);
}

TEST_F(AgentSim, AnAgentThatComesAgainTakesThePlaceOfItsSilentStream) {
  FakeAgent& old = world_.AddAgent("a");
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  old.silent = true;  // as a stream of which the other end is gone, unheard of
  world_.core->OnMessage(Open(stream_), Hello("a"));
  ASSERT_TRUE(world_.executor.AdvanceUntil([&] { return stream_->welcomed.has_value(); }, 3s));
  EXPECT_OK(*stream_->welcomed);
  EXPECT_THAT(old.closed().value(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(world_.core->counts().agents, 1U);
  EXPECT_EQ(world_.core->counts().ranks, 0U) << "it registers them again";
}

TEST_F(AgentSim, TheLastWordsOfADeadAgentAreNoSignOfLife) {
  FakeAgent& old = world_.AddAgent("a");
  world_.core->OnMessage(Open(stream_), Hello("a"));
  proto::AgentMessage heartbeat;
  heartbeat.mutable_heartbeat();
  old.Say(heartbeat);
  world_.executor.RunReady();
  old.silent = true;
  ASSERT_TRUE(world_.executor.AdvanceUntil([&] { return stream_->welcomed.has_value(); }, 4s));
  EXPECT_OK(*stream_->welcomed);
}

TEST_F(AgentSim, ANameIsFreeOnceItsAgentHasEnded) {
  FakeAgent& old = world_.AddAgent("a");
  const rpc::PortId port = Open(stream_);
  world_.core->OnMessage(port, Hello("a"));
  const auto later = std::make_shared<Stream>();
  world_.core->OnMessage(Open(later), Hello("a"));
  EXPECT_FALSE(stream_->welcomed);
  old.Die();
  world_.executor.RunReady();
  EXPECT_OK(stream_->welcomed.value());
  EXPECT_FALSE(later->welcomed) << "one at a time, whoever came first";
  world_.core->OnDetach(port, Status(Code::kUnavailable, "gone", Reason::kPeerLost));
  EXPECT_OK(later->welcomed.value());
  EXPECT_EQ(world_.core->counts().agents, 1U);
}

TEST_F(AgentSim, WhoWaitsForItsNameSaysNothingElse) {
  world_.AddAgent("a");
  const rpc::PortId port = Open(stream_);
  world_.core->OnMessage(port, Hello("a"));
  world_.core->OnMessage(port, Hello("a"));
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kFailedPrecondition, Reason::kMalformed));
  world_.executor.Advance(10s);  // nobody decides about a stream that is gone
  EXPECT_EQ(world_.core->counts().agents, 1U);
}

TEST_F(AgentSim, RefusesNamesThatATerminalWouldActOn) {
  proto::AgentMessage message = Hello("a\xc2\x9bK");
  world_.core->OnMessage(Open(stream_), message);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(stream_->closed->message(), ::testing::HasSubstr("a\\u{009b}K"));
  stream_ = std::make_shared<Stream>();
  message = Hello("a");
  message.mutable_hello()->set_host("\x1b[31m");
  world_.core->OnMessage(Open(stream_), message);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  stream_ = std::make_shared<Stream>();
  message = Hello("a");
  message.mutable_hello()->add_endpoints("tcp:\x1b[31m");
  world_.core->OnMessage(Open(stream_), message);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST_F(AgentSim, RefusesMoreStreamsThanItsBound) {
  for (std::size_t i = 0; i < daemon::kMaxAgents; ++i) Open(std::make_shared<Stream>());
  EXPECT_FALSE(stream_->closed);
  Open(stream_);
  EXPECT_THAT(stream_->closed.value(), IsStatus(Code::kResourceExhausted, Reason::kBusy));
}

TEST_F(AgentSim, NoAgentPublishesOrAsksForRanksOfAnother) {
  world_.AddAgent("a");
  world_.AddAgent("b");
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 1, {"a"}, {});
  Worker& trainer = world_.worker("trainer", 0);
  trainer.agent = "b";
  world_.Publish(trainer, 1);
  EXPECT_THAT(trainer.published.value(),
              IsStatus(Code::kFailedPrecondition, Reason::kStaleVersion));
  Worker& engine = world_.worker("engine", 0);
  engine.agent = "b";
  world_.Update(engine, Selector::kLatest, 5s);
  EXPECT_EQ(engine.updated.value().code(), Code::kFailedPrecondition);
}

TEST_F(AgentSim, NoAgentEndsASessionInWhichItTakesNoPart) {
  for (const char* name : {"a", "b", "onlooker"}) world_.AddAgent(name);
  world_.StartJob("trainer", Role::kProducer, 1, {"a"}, {});
  world_.StartJob("engine", Role::kConsumer, 1, {"b"}, {});
  world_.PublishAll("trainer", 1);
  world_.UpdateAll("engine", Selector::kLatest, 10s);
  ASSERT_EQ(world_.core->counts().sessions, 1U);
  proto::AgentMessage message;
  message.mutable_session_failed()->set_session(1);
  world_.agent("onlooker").Say(std::move(message));
  world_.executor.Advance(1s);
  EXPECT_OK(world_.worker("engine", 0).updated.value());
}

}  // namespace
}  // namespace tensorbus::sim
