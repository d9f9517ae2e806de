#include "worker_shim/client.h"

#include <atomic>
#include <filesystem>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_shim/one_vector.h"
#include "worker_shim/agent_socket.h"
#include "worker_shim/arena.h"

namespace tensorbus::worker_shim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using tensorbus::testing::FakeAgent;
using tensorbus::testing::IsStatus;
using wire::MessageType;

constexpr Nanos kLong = seconds(10);
constexpr Nanos kShort = milliseconds(5);

class ClientTest : public ::testing::Test {
 protected:
  ConnectOptions Options() { return OptionsOf(agent_, "trainer", Role::kProducer); }

  std::unique_ptr<Client> ConnectClient() {
    agent_.Play([this] { agent_.AcceptAndWelcome(); });
    auto client = Client::Connect(Options());
    EXPECT_OK(client);
    agent_.Join();
    return client.ok() ? *std::move(client) : nullptr;
  }

  std::unique_ptr<Client> RegisteredClient(MemoryMode mode = MemoryMode::kCma) {
    auto client = ConnectClient();
    EXPECT_OK(client->Attach({reinterpret_cast<std::byte*>(memory_.data()), sizeof memory_, -1}));
    agent_.Play([this, mode] { registered_ = agent_.TakeRegistration(mode); });
    EXPECT_OK(client->Register(OneVector(), kLong));
    agent_.Join();
    return client;
  }

  static wire::BucketWork Work(std::uint32_t piece, std::uint64_t first, std::uint64_t bytes) {
    wire::BucketRange range;
    range.piece = piece;
    range.box = OneVector().registration.pieces[0].box;
    range.first = first;
    range.bytes = bytes;
    return {{range}};
  }

  RequestId Publish(Client& client, std::uint64_t version) {
    auto request = client.Publish({.version = Version{version}});
    EXPECT_OK(request);
    return *request;
  }
  void AnswerPublish(Status status = {}) {
    const auto frame = agent_.Next(MessageType::kPublish);
    agent_.Send(MessageType::kReply, frame.request, wire::Reply{std::move(status)});
  }

  void BreakOff() {
    agent_.Send(MessageType::kBrokenOff, 0,
                wire::Reply{Status(Code::kFailedPrecondition, "another job publishes",
                                   Reason::kSecondPublisher)});
    agent_.Close();
  }

  FakeAgent agent_;
  std::array<float, 16> memory_ = {};
  wire::Register registered_;
};

// ---- connecting

TEST_F(ClientTest, SaysWhoItIs) {
  const auto client = ConnectClient();
  EXPECT_EQ(agent_.hello().identity, Options().identity);
  EXPECT_EQ(agent_.hello().pid, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(agent_.hello().library, "test");
  EXPECT_EQ(agent_.page().magic, wire::ControlPage::kMagic);
  EXPECT_EQ(client->agent_name(), "fake");
  EXPECT_OK(client->connection());
}

// The agent's own default has the same order (tensorbus/rpc/address.h).
TEST(AgentSocket, LooksWhereTheAgentListens) {
  const auto forget = [] {
    ::unsetenv("TENSORBUS_AGENT_SOCKET");
    ::unsetenv("TENSORBUS_RUNTIME_DIR");
    ::unsetenv("XDG_RUNTIME_DIR");
  };
  forget();
  EXPECT_EQ(DefaultAgentSocket(), "/tmp/tensorbus-" + std::to_string(::getuid()) + "/agent.sock");
  ::setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
  EXPECT_EQ(DefaultAgentSocket(), "/run/user/7/tensorbus/agent.sock");
  ::setenv("TENSORBUS_RUNTIME_DIR", "/run/bus", 1);
  EXPECT_EQ(DefaultAgentSocket(), "/run/bus/agent.sock");
  ::setenv("TENSORBUS_AGENT_SOCKET", "/run/a.sock", 1);
  EXPECT_EQ(DefaultAgentSocket(), "/run/a.sock");
  forget();
}

TEST_F(ClientTest, NamesTheRemedyWhenNoAgentRuns) {
  auto options = Options();
  options.agent_socket += ".nobody";
  const auto client = Client::Connect(options);
  EXPECT_THAT(client, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_THAT(client.status().message(), ::testing::HasSubstr("tensorbusctl up"));
  agent_.StopListening();
  EXPECT_THAT(Client::Connect(Options()), IsStatus(Code::kUnavailable, Reason::kNotRunning));
}

TEST_F(ClientTest, RefusesAnAgentOfSomebodyElse) {
  auto options = Options();
  options.agent_uid = ::geteuid() + 1;
  EXPECT_THAT(Client::Connect(options), IsStatus(Code::kPermissionDenied, Reason::kNone));
}

TEST_F(ClientTest, SaysWhenTheSocketMayNotBeOpened) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  const pid_t child = ::fork();
  if (child == 0) {
    // A group and user that may not open a 0600 socket of ours.
    ::chmod(agent_.path().c_str(), 0600);
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(2);
    const auto client = Client::Connect(Options());
    const bool right = client.status().code() == Code::kPermissionDenied &&
                       client.status().message().find("65534") != std::string::npos;
    ::_exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(ClientTest, RefusesPathsThatCannotBe) {
  auto options = Options();
  options.agent_socket = std::string(200, 'x');
  EXPECT_THAT(Client::Connect(options), IsStatus(Code::kInvalidArgument, Reason::kNone));
}

TEST_F(ClientTest, GivesUpOnAnAgentThatDoesNotAnswer) {
  auto options = Options();
  options.timeout = kShort;
  const Status late = Client::Connect(options).status();
  EXPECT_THAT(late, IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_THAT(late.message(), ::testing::HasSubstr("may not be an agent's socket"));
}

TEST_F(ClientTest, SaysThatAnotherProgramsSocketIsNoAgents) {
  // The daemon begins with a settings frame of HTTP/2, another program with what it likes.
  const std::string settings("\0\0\x12\x04\0\0\0\0\0\0\x04\0\x3f\xff\xff\0\x05\0\x10", 19);
  for (const std::string& word : {settings, std::string("SSH-2.0-OpenSSH_9.2\r\n")}) {
    agent_.Play([this, &word] {
      agent_.Accept();
      agent_.SendText(word);
    });
    const Status refused = Client::Connect(Options()).status();
    EXPECT_THAT(refused, IsStatus(Code::kInvalidArgument, Reason::kNone));
    EXPECT_THAT(refused.message(),
                ::testing::AllOf(::testing::HasSubstr(agent_.path() + " is not an agent's socket"),
                                 ::testing::HasSubstr("does not speak the agent's protocol"),
                                 ::testing::HasSubstr("TENSORBUS_AGENT_SOCKET")));
    agent_.Join();
  }
  agent_.Play([this] {
    agent_.Accept();
    agent_.Send(MessageType::kReply, 1, wire::Reply());
  });
  EXPECT_THAT(Client::Connect(Options()), IsStatus(Code::kInvalidArgument, Reason::kNone));
  agent_.Play([this] {
    agent_.Accept();
    agent_.Close();
  });
  const Status closed = Client::Connect(Options()).status();
  EXPECT_THAT(closed, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_THAT(closed.message(), ::testing::HasSubstr("may not be an agent's socket"));
}

TEST(AgentSocket, IsNotRecommendedInPlaceOfItself) {
  const Status late(Code::kDeadlineExceeded, "late");
  EXPECT_THAT(NoWelcome("/x.sock", late).message(), ::testing::HasSubstr("tensorbusctl up"));
  ::setenv("TENSORBUS_RUNTIME_DIR", "/run/bus", 1);
  EXPECT_THAT(NoWelcome("/x.sock", late).message(), ::testing::HasSubstr("/run/bus/agent.sock"));
  EXPECT_THAT(NoWelcome("/run/bus/agent.sock", late).message(),
              ::testing::Not(::testing::HasSubstr("tensorbusctl up")));
  ::unsetenv("TENSORBUS_RUNTIME_DIR");
}

TEST_F(ClientTest, PassesOnWhyItWasRefused) {
  agent_.Play([this] {
    agent_.Accept();
    agent_.Welcome(Status(Code::kAlreadyExists, "another job", Reason::kSecondPublisher));
    agent_.Close();
  });
  EXPECT_THAT(Client::Connect(Options()), IsStatus(Code::kAlreadyExists, Reason::kSecondPublisher));
}

TEST_F(ClientTest, NamesAnotherProtocol) {
  agent_.Play([this] {
    agent_.Accept();
    wire::Welcome welcome;
    welcome.protocol = wire::kProtocol + 1;
    agent_.Send(MessageType::kWelcome, 1, welcome);
  });
  EXPECT_THAT(Client::Connect(Options()),
              IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
}

TEST_F(ClientTest, SaysGoodbye) {
  auto client = ConnectClient();
  client.reset();
  agent_.Next(MessageType::kGoodbye);
  agent_.ExpectEnd();
}

TEST_F(ClientTest, FailsInAForkedChildAndKeepsTheParentsConnection) {
  auto client = RegisteredClient();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused =
        client->Publish({.version = Version{1}}).status().code() == Code::kFailedPrecondition &&
        client->BeforeWrite(kLong).status().code() == Code::kFailedPrecondition;
    client.reset();
    ::_exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  agent_.Play([this] { AnswerPublish(); });
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(Publish(*client, 1), kLong));
  EXPECT_OK(outcome.status);
}

// ---- registering

TEST_F(ClientTest, RegistersWhatLiesWhere) {
  auto client = ConnectClient();
  ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(8192));
  EXPECT_OK(client->Attach({reinterpret_cast<std::byte*>(memory_.data()), sizeof memory_, -1}));
  EXPECT_OK(client->Attach({arena.data(), arena.size(), arena.fd()}));
  agent_.Play([this] { registered_ = agent_.TakeRegistration(); });
  wire::Register message = OneVector();
  message.flip = FlipMode::kShadow;
  message.leave_out = {"w"};
  ASSERT_OK_AND_ASSIGN(const wire::Registered registered, client->Register(message, kLong));
  agent_.Join();
  EXPECT_EQ(registered.epoch, ChannelEpoch{3});
  EXPECT_EQ(registered.why, "because");
  ASSERT_EQ(agent_.attached().size(), 2U);
  EXPECT_FALSE(agent_.attached()[0].mapped);
  EXPECT_EQ(agent_.attached()[0].address, reinterpret_cast<std::uintptr_t>(memory_.data()));
  EXPECT_TRUE(agent_.attached()[1].mapped);
  struct stat info = {};
  ASSERT_EQ(agent_.attached_fds().size(), 1U);
  ASSERT_EQ(::fstat(agent_.attached_fds()[0].get(), &info), 0);
  EXPECT_EQ(info.st_size, 8192);
  EXPECT_EQ(registered_.registration.segment_bytes,
            (std::vector<std::uint64_t>{sizeof memory_, 8192}));
  EXPECT_EQ(registered_.registration.pieces, message.registration.pieces);
  EXPECT_EQ(registered_.leave_out, message.leave_out);
}

TEST_F(ClientTest, ChecksTheRegistrationBeforeItGoesOut) {
  auto client = ConnectClient();
  EXPECT_OK(client->Attach({reinterpret_cast<std::byte*>(memory_.data()), 8, -1}));
  EXPECT_THAT(client->Register(OneVector(), kLong),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(client->Attach({}), IsStatus(Code::kInvalidArgument, Reason::kNone));
}

TEST_F(ClientTest, PassesOnWhySegmentsOrRegistrationsAreRefused) {
  for (const bool at_segment : {true, false}) {
    auto client = ConnectClient();
    EXPECT_OK(client->Attach({reinterpret_cast<std::byte*>(memory_.data()), sizeof memory_, -1}));
    agent_.Play([this, at_segment] {
      const Status refusal(Code::kResourceExhausted, "no room", Reason::kOutOfMemory);
      auto frame = agent_.Next(MessageType::kAttachSegment);
      agent_.Send(MessageType::kReply, frame.request, wire::Reply{at_segment ? refusal : Status()});
      frame = agent_.Next(MessageType::kRegister);
      wire::Registered answer;
      answer.status = at_segment ? Status(Code::kFailedPrecondition, "no segment") : refusal;
      agent_.Send(MessageType::kRegistered, frame.request, answer);
    });
    EXPECT_THAT(client->Register(OneVector(), kLong),
                IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
    agent_.Join();
  }
}

// ---- requests

TEST_F(ClientTest, MatchesAnswersThatComeOutOfOrder) {
  auto client = RegisteredClient();
  ASSERT_OK_AND_ASSIGN(const RequestId update, client->Update(wire::Update()));
  ASSERT_OK_AND_ASSIGN(const RequestId claim, client->Claim());
  EXPECT_FALSE(client->Done(update));
  agent_.Play([this] {
    const auto first = agent_.Next(MessageType::kUpdate);
    const auto second = agent_.Next(MessageType::kClaim);
    agent_.Send(MessageType::kClaimed, second.request, wire::Claimed{Status(), Version{4}});
    wire::Updated updated;
    updated.version = Version{5};
    updated.bytes = 64;
    updated.digest = {1, 2, 64};
    agent_.Send(MessageType::kUpdated, first.request, updated);
  });
  ASSERT_OK_AND_ASSIGN(const Outcome updated, client->Wait(update, kLong));
  EXPECT_TRUE(client->Done(claim));
  ASSERT_OK_AND_ASSIGN(const Outcome claimed, client->Wait(claim, kLong));
  EXPECT_EQ(updated.version, Version{5});
  EXPECT_EQ(updated.digest, (DigestSum{1, 2, 64}));
  EXPECT_EQ(claimed.version, Version{4});
  EXPECT_THAT(client->Wait(claim, kLong), IsStatus(Code::kNotFound, Reason::kNone));
}

TEST_F(ClientTest, WaitsAgainAfterADeadline) {
  auto client = RegisteredClient();
  const RequestId publish = Publish(*client, 1);
  EXPECT_THAT(client->Wait(publish, kShort), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  agent_.Play([this] { AnswerPublish(); });
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(publish, kLong));
  EXPECT_OK(outcome.status);
}

// ---- what a wait that gives up says

TEST_F(ClientTest, SaysWhatARequestWaitsForWhenAWaitEndsFirst) {
  auto client = RegisteredClient();
  ASSERT_OK_AND_ASSIGN(const RequestId update, client->Update(wire::Update()));
  agent_.Play([this] {
    const auto asked = agent_.Next(MessageType::kUpdate);
    const auto explain = agent_.Next(MessageType::kExplain);
    EXPECT_EQ(explain.request, asked.request);
    agent_.Send(MessageType::kExplained, explain.request,
                wire::Reply{Status(Code::kDeadlineExceeded, "rank 1 of 2 has not registered",
                                   Reason::kMissingRank)});
  });
  const auto ended = client->Wait(update, 2 * Client::kAskingWait);
  EXPECT_THAT(ended, IsStatus(Code::kDeadlineExceeded, Reason::kMissingRank));
  EXPECT_EQ(ended.status().message(), "rank 1 of 2 has not registered (the request goes on)");
  EXPECT_FALSE(client->Done(update));
  agent_.Play(
      [this, update] { agent_.Send(MessageType::kUpdated, update.value, wire::Updated()); });
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(update, kLong));
  EXPECT_OK(outcome.status);
}

TEST_F(ClientTest, SaysThatTheAgentIsSilentWhenItIs) {
  auto client = RegisteredClient();
  ASSERT_OK_AND_ASSIGN(const RequestId update, client->Update(wire::Update()));
  for (int i = 0; i < 2; ++i) {
    const auto ended = client->Wait(update, 2 * Client::kAskingWait);
    EXPECT_THAT(ended, IsStatus(Code::kDeadlineExceeded, Reason::kNone));
    EXPECT_NE(ended.status().message().find("has not answered yet"), std::string::npos);
    if (i == 1) break;
    // An explanation of the wait before is not one of the next.
    agent_.Play([this, update] {
      agent_.Send(MessageType::kExplained, update.value,
                  wire::Reply{Status(Code::kDeadlineExceeded, "long ago", Reason::kMissingRank)});
    });
    agent_.Join();
    EXPECT_OK(client->Poll());
  }
}

TEST_F(ClientTest, ExplainsToACallerThatWaitsInSlices) {
  auto client = RegisteredClient();
  const RequestId publish = Publish(*client, 1);
  client->Explain(publish);
  agent_.Play([this] {
    const auto asked = agent_.Next(MessageType::kPublish);
    const auto explain = agent_.Next(MessageType::kExplain);
    agent_.Send(MessageType::kExplained, explain.request,
                wire::Reply{Status(Code::kDeadlineExceeded, "no daemon", Reason::kNotRunning)});
    agent_.Send(MessageType::kReply, asked.request, wire::Reply());
    agent_.Send(MessageType::kExplained, explain.request,
                wire::Reply{Status(Code::kDeadlineExceeded, "too late", Reason::kBusy)});
  });
  agent_.Join();
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(publish, kLong));
  EXPECT_OK(outcome.status);
  EXPECT_OK(client->Poll()) << "an explanation that comes after the answer breaks nothing";
  EXPECT_OK(client->connection());
}

TEST_F(ClientTest, DropsTheAnswerToAForgottenRequest) {
  auto client = RegisteredClient();
  const RequestId forgotten = Publish(*client, 1);
  client->Forget(forgotten);
  const RequestId kept = Publish(*client, 2);
  agent_.Play([this] {
    AnswerPublish();
    AnswerPublish();
  });
  EXPECT_OK(client->Wait(kept, kLong));
  EXPECT_THAT(client->Wait(forgotten, kLong), IsStatus(Code::kNotFound, Reason::kNone));
}

TEST_F(ClientTest, BoundsRequestsThatNobodyWaitsFor) {
  auto client = RegisteredClient();
  for (std::size_t i = 0; i < Client::kRequestsMax; ++i) ASSERT_OK(client->Claim());
  EXPECT_THAT(client->Claim(), IsStatus(Code::kResourceExhausted, Reason::kBusy));
}

TEST_F(ClientTest, FailsEverythingWhenTheAgentGoes) {
  auto client = RegisteredClient();
  const RequestId first = Publish(*client, 1);
  ASSERT_OK_AND_ASSIGN(const RequestId second, client->Claim());
  agent_.Close();
  for (const RequestId request : {first, second}) {
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(request, kLong));
    EXPECT_THAT(outcome.status, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  }
  EXPECT_THAT(client->Claim(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_THAT(client->connection(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_OK(client->BeforeWrite(kLong)) << "nobody reads the memory of a worker without an agent";
}

MATCHER(SaysWhyItWasBrokenOff, "") {
  const Status status = testing::ToStatus(arg);
  *result_listener << status;
  return status.code() == Code::kUnavailable && status.reason() == Reason::kPeerLost &&
         status.message().find("policy/trainer rank 1 of 2 was broken off") != std::string::npos &&
         status.message().find("another job publishes") != std::string::npos &&
         status.message().find("connect again") != std::string::npos;
}

TEST_F(ClientTest, SaysWhyItsAgentBrokeItOff) {
  auto client = RegisteredClient();
  const RequestId first = Publish(*client, 1);
  ASSERT_OK_AND_ASSIGN(const RequestId second, client->Claim());
  BreakOff();
  for (const RequestId request : {first, second}) {
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(request, kLong));
    EXPECT_THAT(outcome.status, SaysWhyItWasBrokenOff());
  }
  EXPECT_THAT(client->Claim(), SaysWhyItWasBrokenOff());
  EXPECT_THAT(client->connection(), SaysWhyItWasBrokenOff());
  EXPECT_OK(client->BeforeWrite(kLong)) << "nobody reads the memory of a worker without an agent";
}

TEST_F(ClientTest, SaysWhyItWasBrokenOffToWhoFindsTheSocketClosed) {
  auto client = RegisteredClient();
  BreakOff();
  EXPECT_THAT(client->Claim(), SaysWhyItWasBrokenOff());
}

TEST_F(ClientTest, SaysWhyItWasBrokenOffInTheMiddleOfAHook) {
  for (const bool in_hook : {true, false}) {
    auto client = RegisteredClient();
    const RequestId publish = Publish(*client, 1);
    client->SetHook([&](HookKind, const wire::HookEvent&) {
      BreakOff();
      // Its answer finds the socket closed, or the request of another thread does before.
      if (!in_hook)
        std::thread([&] { EXPECT_THAT(client->Claim(), SaysWhyItWasBrokenOff()); }).join();
      return Status();
    });
    agent_.Send(MessageType::kFence, 70, wire::HookEvent());
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(publish, kLong));
    EXPECT_THAT(outcome.status, SaysWhyItWasBrokenOff()) << in_hook;
  }
}

TEST_F(ClientTest, SaysWhyItWasBrokenOffBeforeItsWelcome) {
  agent_.Play([this] {
    agent_.Accept();
    BreakOff();
  });
  EXPECT_THAT(Client::Connect(Options()), SaysWhyItWasBrokenOff());
}

TEST_F(ClientTest, RefusesAnAgentThatBreaksTheProtocol) {
  for (const int what : {0, 1, 2, 3, 4}) {
    auto client = RegisteredClient();
    const RequestId publish = Publish(*client, 1);
    agent_.Play([this, what] {
      const auto frame = agent_.Next(MessageType::kPublish);
      if (what == 0) agent_.Send(MessageType::kReply, frame.request + 100, wire::Reply());
      if (what == 1) agent_.Send(MessageType::kClaimed, frame.request, wire::Claimed());
      if (what == 2) agent_.SendBytes(MessageType::kReply, frame.request, {std::byte{99}});
      if (what == 3) agent_.Send(MessageType::kBrokenOff, 0, wire::Reply());
      if (what == 4) agent_.SendBytes(MessageType::kBrokenOff, 0, {});
    });
    ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(publish, kLong));
    EXPECT_THAT(outcome.status, IsStatus(Code::kInternal, Reason::kMalformed)) << what;
    agent_.Join();
  }
}

TEST_F(ClientTest, RegistersAgainWithTheNextAgent) {
  auto client = RegisteredClient();
  const RequestId lost = Publish(*client, 1);
  agent_.Close();
  ASSERT_OK(client->Wait(lost, kLong));
  agent_.Play([this] {
    agent_.AcceptAndWelcome();
    registered_ = agent_.TakeRegistration();
    AnswerPublish();
  });
  ASSERT_OK(client->Reconnect(kLong));
  EXPECT_OK(client->connection());
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, client->Wait(Publish(*client, 2), kLong));
  EXPECT_OK(outcome.status);
  agent_.Join();
  EXPECT_EQ(registered_.registration.pieces, OneVector().registration.pieces);
}

TEST_F(ClientTest, WaitsForTheNextAgentToListen) {
  auto client = RegisteredClient();
  agent_.StopListening();
  agent_.Close();
  int looks = 0;
  agent_.Play([] {});
  ASSERT_OK(client->Reconnect(kLong, [&] {
    // Meanwhile nobody is told anything, and a writer may go on.
    EXPECT_OK(client->BeforeWrite(Nanos::zero()));
    EXPECT_THAT(client->Reconnect(kLong), IsStatus(Code::kFailedPrecondition, Reason::kBusy));
    if (++looks == 3) {
      agent_.Listen();
      agent_.Play([this] {
        agent_.AcceptAndWelcome();
        registered_ = agent_.TakeRegistration();
      });
    }
    return false;
  }));
  agent_.Join();
  EXPECT_GE(looks, 3);
  EXPECT_OK(client->connection());
}

TEST_F(ClientTest, WaitsForTheNextAgentAlsoWhenTheLastOneStillClosesConnections) {
  auto client = RegisteredClient();
  agent_.Play([this] {
    agent_.Close();
    agent_.Accept();
    agent_.Close();
    agent_.AcceptAndWelcome();
    registered_ = agent_.TakeRegistration();
  });
  EXPECT_OK(client->Reconnect(kLong));
  agent_.Join();
}

TEST_F(ClientTest, WaitsNoLongerForAnAgentThanItMay) {
  auto client = RegisteredClient();
  agent_.StopListening();
  agent_.Close();
  const auto begin = std::chrono::steady_clock::now();
  const Status late = client->Reconnect(milliseconds(60)).status();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(60));
  EXPECT_THAT(late, IsStatus(Code::kUnavailable, Reason::kNotRunning));
  EXPECT_THAT(client->Reconnect(kLong, [] { return true; }),
              IsStatus(Code::kCancelled, Reason::kCancelled));
  EXPECT_FALSE(client->connection().ok());
}

TEST_F(ClientTest, WaitsForNoAgentThatRefusesIt) {
  auto client = RegisteredClient();
  agent_.Play([this] {
    agent_.Close();
    agent_.Accept();
    agent_.Welcome(Status(Code::kAlreadyExists, "another job", Reason::kSecondPublisher));
  });
  EXPECT_THAT(client->Reconnect(kLong), IsStatus(Code::kAlreadyExists, Reason::kSecondPublisher));
}

/// A client whose agent went away after it had published version 2, and what the next one is told.
class ReturnTest : public ClientTest {
 protected:
  void SetUp() override {
    client_ = RegisteredClient();
    wire::Publish publish{.version = Version{2}, .min_replicas = 3, .receipts = true};
    Offer(publish);
  }
  void Offer(const wire::Publish& publish) {
    ASSERT_OK_AND_ASSIGN(const RequestId request, client_->Publish(publish));
    agent_.Play([this] { AnswerPublish(); });
    ASSERT_OK(client_->Wait(request, kLong));
    agent_.Join();
  }
  wire::Return ComeBack() {
    agent_.Close();
    EXPECT_THAT(client_->Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
    return Reconnect();
  }
  wire::Return Reconnect() {
    agent_.Play([this] {
      agent_.AcceptAndWelcome();
      registered_ = agent_.TakeRegistration();
    });
    EXPECT_OK(client_->Reconnect(kLong));
    agent_.Join();
    return registered_.back;
  }

  std::unique_ptr<Client> client_;
};

TEST_F(ReturnTest, TellsTheNextAgentWhatItHolds) {
  EXPECT_EQ(registered_.back.epoch, ChannelEpoch{}) << "it was new";
  const wire::Return back = ComeBack();
  EXPECT_EQ(back.epoch, ChannelEpoch{3});
  EXPECT_EQ(back.published, Version{2});
  EXPECT_EQ(back.publishing, Version{});
  EXPECT_EQ(back.held.version, Version{2});
  EXPECT_EQ(back.held.min_replicas, 3U);
  EXPECT_TRUE(back.held.receipts);
  EXPECT_EQ(back.write_count, client_->write_count());
  // The fence holds as before.
  agent_.Play([this] {
    const auto asked = agent_.Next(MessageType::kRequestRelease);
    EXPECT_EQ(wire::Decode<wire::RequestRelease>(asked.body)->version, Version{2});
    agent_.Send(MessageType::kReleased, asked.request,
                wire::Released{Version{2}, Status(Code::kDeadlineExceeded, "an engine wants it")});
  });
  EXPECT_THAT(client_->BeforeWrite(kLong), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
}

TEST_F(ReturnTest, HoldsNothingOnceItMayHaveWritten) {
  agent_.Close();
  EXPECT_THAT(client_->Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_OK(client_->BeforeWrite(kLong));
  const wire::Return back = Reconnect();
  EXPECT_EQ(back.published, Version{2});
  EXPECT_EQ(back.held.version, Version{});
  EXPECT_OK(client_->BeforeWrite(kLong)) << "there is nothing to wait for";
}

TEST_F(ReturnTest, HoldsNothingThatWasReleased) {
  agent_.page().released_version = 2;
  EXPECT_EQ(ComeBack().held.version, Version{});
}

TEST_F(ReturnTest, HoldsNothingWhenTheCounterMoved) {
  ++agent_.page().write_count;
  EXPECT_EQ(ComeBack().held.version, Version{});
}

TEST_F(ReturnTest, HoldsNothingOfALayoutThatAnotherOneReplaced) {
  agent_.Play([this] { registered_ = agent_.TakeRegistration(); });
  ASSERT_OK(client_->Register(OneVector(), kLong));
  agent_.Join();
  const wire::Return back = ComeBack();
  EXPECT_EQ(back.epoch, ChannelEpoch{3});
  EXPECT_EQ(back.published, Version{});
  EXPECT_EQ(back.held.version, Version{});
}

TEST_F(ReturnTest, AnotherLayoutIsRefusedWhileARequestIsOnItsWayAndChangesNothing) {
  ASSERT_OK(client_->RequestRelease(Version{2}, kLong));
  agent_.Next(MessageType::kRequestRelease);
  std::array<float, 32> elsewhere = {};
  client_->DetachAll();
  ASSERT_OK(
      client_->Attach({reinterpret_cast<std::byte*>(elsewhere.data()), sizeof elsewhere, -1}));
  wire::Register other = OneVector();
  other.registration.tensors[0].name = "other";
  EXPECT_THAT(client_->Register(other, kLong), IsStatus(Code::kFailedPrecondition, Reason::kBusy));
  const wire::Return back = ComeBack();
  EXPECT_EQ(back.held.version, Version{2});
  EXPECT_EQ(registered_.registration.tensors[0].name, "v");
  EXPECT_EQ(agent_.attached().back().address, reinterpret_cast<std::uintptr_t>(memory_.data()));
}

TEST_F(ReturnTest, AnotherLayoutWhoseMemoryIsNoneChangesNothing) {
  ASSERT_OK_AND_ASSIGN(const UniqueFd file, CreateMemfd("test", sizeof memory_));
  wire::Register other = OneVector();
  other.registration.tensors[0].name = "other";
  // No descriptor is left to pass one on with.
  ASSERT_OK(
      client_->Attach({reinterpret_cast<std::byte*>(memory_.data()), sizeof memory_, file.get()}));
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const Status refused = client_->Register(other, kLong).status();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_THAT(refused, IsStatus(Code::kResourceExhausted, Reason::kNone));
  EXPECT_OK(client_->connection());
  const wire::Return back = ComeBack();
  EXPECT_EQ(back.held.version, Version{2});
  EXPECT_EQ(registered_.registration.tensors[0].name, "v");
  EXPECT_EQ(agent_.attached().size(), 2U) << "once with each agent, and nothing of the other one";
}

TEST_F(ReturnTest, AnotherLayoutThatTheAgentRefusesEndsTheConnection) {
  agent_.Play([this] {
    agent_.Next(MessageType::kAttachSegment);
    const auto frame = agent_.Next(MessageType::kRegister);
    agent_.Send(MessageType::kReply, frame.request - 1,
                wire::Reply{Status(Code::kInvalidArgument, "not this memory")});
    wire::Registered answer;
    answer.status = Status(Code::kInvalidArgument, "not this memory");
    agent_.Send(MessageType::kRegistered, frame.request, answer);
    agent_.ExpectEnd();
  });
  EXPECT_EQ(client_->Register(OneVector(), kLong).status().code(), Code::kInvalidArgument);
  agent_.Join();
  EXPECT_THAT(client_->connection(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_EQ(Reconnect().held.version, Version{}) << "it was another layout's";
}

TEST_F(ReturnTest, AnotherLayoutThatTheAgentNeverAnswersEndsTheConnection) {
  agent_.Play([this] {
    agent_.Next(MessageType::kAttachSegment);
    agent_.Next(MessageType::kRegister);
    agent_.ExpectEnd();
  });
  EXPECT_EQ(client_->Register(OneVector(), milliseconds(50)).status().code(),
            Code::kDeadlineExceeded);
  agent_.Join();
  EXPECT_THAT(client_->connection(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(ReturnTest, SaysWhichPublishWasNotAnswered) {
  agent_.page().released_version = 2;
  ASSERT_OK(client_->BeforeWrite(kLong));
  Publish(*client_, 3);
  wire::Return back = ComeBack();
  EXPECT_EQ(back.published, Version{2});
  EXPECT_EQ(back.publishing, Version{3});
  EXPECT_EQ(back.held.version, Version{});
  Offer({.version = Version{3}});
  back = ComeBack();
  EXPECT_EQ(back.published, Version{3});
  EXPECT_EQ(back.publishing, Version{});
  EXPECT_EQ(back.held.version, Version{3});
}

TEST_F(ReturnTest, ARefusedAttemptMayBeMadeAgainAndBindsNoWriter) {
  agent_.Close();
  EXPECT_THAT(client_->Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  agent_.Play([this] {
    agent_.AcceptAndWelcome();
    agent_.Next(MessageType::kAttachSegment);
    const auto frame = agent_.Next(MessageType::kRegister);
    wire::Registered answer;
    answer.status = Status(Code::kUnavailable, "no daemon", Reason::kNotRunning);
    agent_.Send(MessageType::kReply, frame.request - 1, wire::Reply());
    agent_.Send(MessageType::kRegistered, frame.request, answer);
  });
  EXPECT_THAT(client_->Reconnect(kLong), IsStatus(Code::kUnavailable, Reason::kNotRunning));
  agent_.Join();
  EXPECT_FALSE(client_->connection().ok());
  EXPECT_EQ(Reconnect().held.version, Version{2});
}

TEST_F(ReturnTest, AWriterWaitsForTheAgentThatIsBeingToldWhatItWouldOverwrite) {
  agent_.Close();
  EXPECT_THAT(client_->Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
  std::atomic<bool> told = false;
  agent_.Play([this, &told] {
    agent_.Accept();  // the client waits for its welcome: it is connecting
    std::thread writer([this, &told] {
      EXPECT_OK(client_->BeforeWrite(kLong));
      EXPECT_TRUE(told);
    });
    ::poll(nullptr, 0, 50);
    agent_.Welcome();
    registered_ = agent_.TakeRegistration();
    const auto asked = agent_.Next(MessageType::kRequestRelease);
    told = true;
    agent_.page().released_version = 2;
    agent_.Send(MessageType::kReleased, asked.request, wire::Released{Version{2}, Status()});
    writer.join();
  });
  EXPECT_OK(client_->Reconnect(kLong));
  agent_.Join();
  EXPECT_EQ(registered_.back.held.version, Version{2});
}

TEST_F(ClientTest, AFenceHoldsForEachOfSeveralPublishesOnTheirWay) {
  auto client = RegisteredClient();
  Publish(*client, 1);
  const RequestId second = Publish(*client, 2);
  agent_.Play([this] {
    AnswerPublish();
    AnswerPublish(Status(Code::kFailedPrecondition, "still busy", Reason::kBusy));
    const auto asked = agent_.Next(MessageType::kRequestRelease);
    EXPECT_EQ(wire::Decode<wire::RequestRelease>(asked.body)->version, Version{1});
    agent_.Send(MessageType::kReleased, asked.request, wire::Released{Version{1}, Status()});
  });
  ASSERT_OK(client->Wait(second, kLong));
  EXPECT_OK(client->BeforeWrite(kLong));
}

// ---- hooks and buckets

TEST_F(ClientTest, RunsHooksInTheThreadThatWaits) {
  auto client = RegisteredClient();
  ASSERT_OK_AND_ASSIGN(const RequestId update, client->Update(wire::Update()));
  std::vector<HookKind> seen;
  const auto here = std::this_thread::get_id();
  client->SetHook([&](HookKind kind, const wire::HookEvent& event) -> Status {
    EXPECT_EQ(std::this_thread::get_id(), here);
    EXPECT_EQ(event.version, Version{5});
    EXPECT_THAT(client->Wait(update, kLong), IsStatus(Code::kFailedPrecondition, Reason::kNone));
    EXPECT_OK(client->connection());
    seen.push_back(kind);
    if (kind == HookKind::kLive) return {Code::kAborted, "engine says no"};
    return {};
  });
  agent_.Play([this] {
    const auto asked = agent_.Next(MessageType::kUpdate);
    const wire::HookEvent event{.session = SessionId{1}, .version = Version{5}, .timeout_ms = 9};
    for (const MessageType type :
         {MessageType::kFence, MessageType::kFlipBegin, MessageType::kLive}) {
      agent_.Send(type, 70, event);
      const auto done = agent_.Next(MessageType::kHookDone);
      EXPECT_EQ(done.request, 70U);
      const auto status = wire::Decode<wire::HookDone>(done.body)->status;
      EXPECT_EQ(status.ok(), type != MessageType::kLive);
    }
    agent_.Send(MessageType::kUpdated, asked.request, wire::Updated());
  });
  ASSERT_OK(client->Wait(update, kLong));
  EXPECT_EQ(seen, (std::vector{HookKind::kFence, HookKind::kFlipBegin, HookKind::kLive}));
}

TEST_F(ClientTest, AnswersWithoutAHook) {
  auto client = RegisteredClient();
  agent_.Send(MessageType::kFence, 5, wire::HookEvent());
  ASSERT_OK(client->Poll());
  const auto done = agent_.Next(MessageType::kHookDone);
  EXPECT_OK(wire::Decode<wire::HookDone>(done.body)->status);
}

TEST_F(ClientTest, ServesBucketsFromItsServiceThread) {
  auto client = RegisteredClient(MemoryMode::kBucket);
  for (std::size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<float>(i);
  ASSERT_OK(client->StartService());
  ASSERT_OK(client->StartService());
  ASSERT_OK_AND_ASSIGN(UniqueFd fd, CreateMemfd("bucket", 4096));
  ASSERT_OK_AND_ASSIGN(const Mapping bucket,
                       Mapping::Create(fd.get(), 4096, Mapping::Access::kReadWrite));
  std::vector<UniqueFd> fds;
  fds.push_back(std::move(fd));
  agent_.Send(MessageType::kAttachBucket, 0, wire::AttachBucket{.bucket = 0, .bytes = 4096},
              std::move(fds));
  agent_.Send(MessageType::kPack, 8, Work(0, 4, 8));
  const auto packed = agent_.Next(MessageType::kBucketDone);
  EXPECT_EQ(packed.request, 8U);
  ASSERT_OK(wire::Decode<wire::BucketDone>(packed.body)->status);
  EXPECT_EQ(reinterpret_cast<const float*>(bucket.data())[1], 2.0F);
  agent_.Send(MessageType::kUnpack, 9, Work(0, 0, 4));
  EXPECT_OK(wire::Decode<wire::BucketDone>(agent_.Next(MessageType::kBucketDone).body)->status);
  agent_.Send(MessageType::kUnpack, 10, Work(7, 0, 4));
  EXPECT_FALSE(
      wire::Decode<wire::BucketDone>(agent_.Next(MessageType::kBucketDone).body)->status.ok());
  // A waiter and the service share the one reader.
  agent_.Play([this] { AnswerPublish(); });
  EXPECT_OK(client->Wait(Publish(*client, 1), kLong));
  client->StopService();
  EXPECT_EQ(memory_[0], 1.0F);
}

TEST_F(ClientTest, WakesAnEventLoop) {
  auto client = RegisteredClient();
  ASSERT_OK_AND_ASSIGN(const int fd, client->PollFd());
  pollfd item = {fd, POLLIN, 0};
  EXPECT_EQ(::poll(&item, 1, 0), 0);
  const RequestId publish = Publish(*client, 1);
  AnswerPublish();
  ASSERT_EQ(::poll(&item, 1, 10'000), 1);
  ASSERT_OK(client->Poll());
  EXPECT_TRUE(client->Done(publish));
  ASSERT_OK(client->Poll());
  EXPECT_EQ(::poll(&item, 1, 0), 0) << "still readable with nothing to do";

  // Also when another thread does the reading.
  ASSERT_OK(client->StartService());
  const RequestId second = Publish(*client, 2);
  AnswerPublish();
  ASSERT_EQ(::poll(&item, 1, 10'000), 1);
  ASSERT_OK(client->Wait(second, kLong));
  // And when the agent goes.
  client->StopService();
  EXPECT_OK(client->Poll());
  EXPECT_EQ(::poll(&item, 1, 0), 0);
  agent_.Close();
  ASSERT_EQ(::poll(&item, 1, 10'000), 1);
  EXPECT_THAT(client->Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

// ---- the write fence

TEST_F(ClientTest, CountsWritesWithoutAskingWhenNothingIsPublished) {
  auto client = RegisteredClient();
  ASSERT_OK(client->BeforeWrite(kLong));
  ASSERT_OK(client->BeforeWrite(kLong));
  EXPECT_EQ(agent_.page().write_count.load(), 2U);
  EXPECT_EQ(client->write_count(), 2U);
}

TEST_F(ClientTest, WritesAtOnceWhenTheControlPageSaysReleased) {
  auto client = RegisteredClient();
  const RequestId publish = Publish(*client, 7);
  AnswerPublish();
  ASSERT_OK(client->Wait(publish, kLong));
  agent_.page().released_version.store(7);
  ASSERT_OK(client->BeforeWrite(kShort));
  EXPECT_EQ(client->released_version(), Version{7});
}

TEST_F(ClientTest, WaitsForTheReleaseBeforeItWrites) {
  auto client = RegisteredClient();
  Publish(*client, 7);  // not waited for: the fence does
  agent_.Play([this] {
    AnswerPublish();
    const auto frame = agent_.Next(MessageType::kRequestRelease);
    const auto request = wire::Decode<wire::RequestRelease>(frame.body);
    EXPECT_EQ(request->version, Version{7});
    EXPECT_GT(request->timeout_ms, 1000U);
    EXPECT_EQ(agent_.page().write_count.load(), 0U) << "counted before the release";
    agent_.page().released_version.store(7);
    agent_.Send(MessageType::kReleased, frame.request, wire::Released{Version{7}, Status()});
  });
  ASSERT_OK(client->BeforeWrite(kLong));
  EXPECT_EQ(agent_.page().write_count.load(), 1U);
}

TEST_F(ClientTest, DoesNotWriteWhileTheVersionIsHeld) {
  auto client = RegisteredClient();
  const RequestId publish = Publish(*client, 7);
  AnswerPublish();
  ASSERT_OK(client->Wait(publish, kLong));
  agent_.Play([this] {
    const auto frame = agent_.Next(MessageType::kRequestRelease);
    agent_.Send(MessageType::kReleased, frame.request,
                wire::Released{.version = Version{7},
                               .status = Status(Code::kDeadlineExceeded, "engine is slow")});
  });
  const auto result = client->BeforeWrite(kShort);
  EXPECT_THAT(result, IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_THAT(result.status().message(), ::testing::HasSubstr("version 7"));
  EXPECT_EQ(agent_.page().write_count.load(), 0U);
  // The version stays held: the next write waits as well.
  agent_.Play([this] {
    const auto frame = agent_.Next(MessageType::kRequestRelease);
    agent_.Send(MessageType::kReleased, frame.request, wire::Released{Version{7}, Status()});
  });
  ASSERT_OK(client->BeforeWrite(kLong));
}

TEST_F(ClientTest, NoTimeToWaitIsNotAllTheTime) {
  auto client = RegisteredClient();
  ASSERT_OK(client->RequestRelease(Version{7}, Nanos::zero()));
  const auto frame = agent_.Next(MessageType::kRequestRelease);
  EXPECT_EQ(wire::Decode<wire::RequestRelease>(frame.body)->timeout_ms, 1U);
}

TEST_F(ClientTest, ARefusedPublishHoldsNothingButTheOneBeforeDoes) {
  auto client = RegisteredClient();
  const RequestId first = Publish(*client, 7);
  AnswerPublish();
  ASSERT_OK(client->Wait(first, kLong));
  const RequestId second = Publish(*client, 5);
  AnswerPublish(Status(Code::kFailedPrecondition, "goes back", Reason::kStaleVersion));
  ASSERT_OK(client->Wait(second, kLong));
  agent_.Play([this] {
    const auto frame = agent_.Next(MessageType::kRequestRelease);
    EXPECT_EQ(wire::Decode<wire::RequestRelease>(frame.body)->version, Version{7});
    agent_.Send(MessageType::kReleased, frame.request, wire::Released{Version{7}, Status()});
  });
  ASSERT_OK(client->BeforeWrite(kLong));
}

}  // namespace
}  // namespace tensorbus::worker_shim
