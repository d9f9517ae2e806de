#include "tensorbus/client/client.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_shim/fake_agent.h"

namespace tensorbus::client {
namespace {

using tensorbus::testing::FakeAgent;
using tensorbus::testing::IsStatus;
using wire::MessageType;
using namespace std::chrono_literals;

/// The translation to and from the C interface; what the interface does is tested below it.
class CppClient : public ::testing::Test {
 protected:
  ConnectOptions Options() {
    ConnectOptions options;
    options.identity = {.channel = "policy",
                        .job = "engine",
                        .role = Role::kConsumer,
                        .replica = 2,
                        .rank = 1,
                        .rank_count = 3};
    options.agent_socket = agent_.path();
    options.timeout = 10s;
    return options;
  }

  Client ConnectClient() {
    agent_.Play([this] { agent_.AcceptAndWelcome(); });
    auto client = Client::Connect(Options());
    EXPECT_OK(client);
    agent_.Join();
    return std::move(client).value();
  }

  FakeAgent agent_;
};

TEST_F(CppClient, PassesOnTheIdentity) {
  const Client client = ConnectClient();
  EXPECT_EQ(agent_.hello().identity, Options().identity);
  EXPECT_THAT(agent_.hello().library, ::testing::StartsWith("tensorbus "));
  EXPECT_EQ(client.agent_name(), "fake");
}

TEST_F(CppClient, KeepsEveryPartOfAFailure) {
  agent_.Play([this] {
    agent_.Accept();
    agent_.Welcome(Status(Code::kAlreadyExists, "other job", Reason::kSecondPublisher, 17));
  });
  const auto client = Client::Connect(Options());
  EXPECT_THAT(client, IsStatus(Code::kAlreadyExists, Reason::kSecondPublisher));
  EXPECT_EQ(client.status().native(), 17);
  EXPECT_THAT(client.status().message(), ::testing::HasSubstr("other job"));
}

TEST_F(CppClient, PassesOnARegistrationWhole) {
  Client client = ConnectClient();
  ASSERT_OK_AND_ASSIGN(const Arena arena, Arena::Create(4096));
  std::array<std::byte, 64> heap = {};
  ASSERT_OK_AND_ASSIGN(const std::uint32_t first, client.Attach(arena));
  ASSERT_OK_AND_ASSIGN(const std::uint32_t second, client.AttachPrivate(heap));
  EXPECT_EQ(first, 0U);
  EXPECT_EQ(second, 1U);

  RegisterOptions options;
  const std::array<std::uint64_t, 3> dims = {4, 2, 6};
  options.tensors = {{"cube", DType::kBf16, Shape::Create(dims).value()},
                     {"scalar", DType::kI64, Shape()}};
  Piece piece;
  const std::array<Range, 3> ranges = {Range{1, 3}, Range{0, 2}, Range{2, 6}};
  piece.box = Box(ranges);
  piece.offset = 128;
  piece.strides = {2, 4, 8};
  Piece scalar;
  scalar.tensor = 1;
  scalar.segment = 1;
  scalar.offset = 8;
  options.pieces = {piece, scalar};
  options.flip = FlipMode::kShadow;
  options.proof = Proof::kMemory;
  options.leave_out = {"a", "b"};
  options.private_mode = MemoryMode::kBucket;
  wire::Register seen;
  agent_.Play([&] { seen = agent_.TakeRegistration(MemoryMode::kBucket); });
  ASSERT_OK_AND_ASSIGN(const Registered registered, client.Register(options));
  agent_.Join();
  EXPECT_EQ(registered.mode, MemoryMode::kBucket);
  EXPECT_EQ(registered.why, "because");
  EXPECT_EQ(registered.epoch, ChannelEpoch{3});
  EXPECT_EQ(registered.latest_version, Version{8});
  EXPECT_EQ(seen.registration.tensors, options.tensors);
  EXPECT_EQ(seen.registration.pieces, options.pieces);
  EXPECT_EQ(seen.registration.segment_bytes, (std::vector<std::uint64_t>{4096, 64}));
  EXPECT_EQ(seen.flip, FlipMode::kShadow);
  EXPECT_EQ(seen.proof, Proof::kMemory);
  EXPECT_EQ(seen.leave_out, options.leave_out);
  EXPECT_EQ(seen.private_mode, 3);
}

TEST_F(CppClient, PassesOnPublishAndUpdate) {
  Client client = ConnectClient();
  ASSERT_OK_AND_ASSIGN(Request publish, client.Publish({.version = Version{7},
                                                        .policy = SlowConsumer::kSnapshot,
                                                        .min_replicas = 2,
                                                        .receipts = true,
                                                        .keep_last = 3}));
  const auto published = agent_.Next(MessageType::kPublish);
  const auto message = wire::Decode<wire::Publish>(published.body);
  ASSERT_OK(message);
  EXPECT_EQ(message->version, Version{7});
  EXPECT_EQ(message->policy, wire::SlowConsumer::kSnapshot);
  EXPECT_EQ(message->min_replicas, 2U);
  EXPECT_TRUE(message->receipts);
  EXPECT_EQ(message->keep_last, 3U);
  EXPECT_FALSE(publish.done());
  EXPECT_THAT(publish.Wait(1ms), IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  agent_.Send(MessageType::kReply, published.request, wire::Reply());
  ASSERT_OK(publish.Wait(10s));
  EXPECT_TRUE(publish.done());
  EXPECT_THAT(publish.Wait(10s), IsStatus(Code::kFailedPrecondition, Reason::kNone));

  ASSERT_OK_AND_ASSIGN(
      Request update,
      client.Update({.selector = Selector::kPinned, .version = Version{7}, .timeout = 2s}));
  const auto updated = agent_.Next(MessageType::kUpdate);
  const auto asked = wire::Decode<wire::Update>(updated.body);
  ASSERT_OK(asked);
  EXPECT_EQ(asked->selector, wire::Selector::kPinned);
  EXPECT_EQ(asked->version, Version{7});
  EXPECT_EQ(asked->timeout_ms, 2000U);
  wire::Updated answer;
  answer.version = Version{7};
  answer.session = SessionId{9};
  answer.bytes = 100;
  answer.seconds = 0.5;
  answer.copy_seconds = 0.25;
  answer.digest = {3, 4, 100};
  agent_.Send(MessageType::kUpdated, updated.request, answer);
  ASSERT_OK_AND_ASSIGN(const Outcome outcome, update.Wait(10s));
  EXPECT_EQ(outcome.version, Version{7});
  EXPECT_EQ(outcome.session, SessionId{9});
  EXPECT_EQ(outcome.bytes, 100U);
  EXPECT_EQ(outcome.seconds, 0.5);
  EXPECT_EQ(outcome.copy_seconds, 0.25);
  EXPECT_EQ(outcome.digest, (DigestSum{3, 4, 100}));
}

TEST_F(CppClient, AnUpdateWithoutTimeAsksForTheShortest) {
  Client client = ConnectClient();
  for (const Nanos timeout : {Nanos(0), Nanos(1), Nanos(1ms)}) {
    ASSERT_OK_AND_ASSIGN(const Request update, client.Update({.timeout = timeout}));
    const auto asked = wire::Decode<wire::Update>(agent_.Next(MessageType::kUpdate).body);
    ASSERT_OK(asked);
    EXPECT_EQ(asked->timeout_ms, 1U) << timeout.count();
  }
}

TEST_F(CppClient, PassesOnAHooksRefusalWithItsText) {
  Client client = ConnectClient();
  client.SetHook([](const HookEvent& event) -> Status {
    EXPECT_EQ(event.kind, HookKind::kFlipBegin);
    EXPECT_EQ(event.version, Version{4});
    EXPECT_EQ(event.timeout, 3s);
    return {Code::kAborted, "requests are running"};
  });
  agent_.Send(MessageType::kFlipBegin, 5,
              wire::HookEvent{.session = SessionId{1}, .version = Version{4}, .timeout_ms = 3000});
  ASSERT_OK(client.Poll());
  const auto done = wire::Decode<wire::HookDone>(agent_.Next(MessageType::kHookDone).body);
  ASSERT_OK(done);
  EXPECT_EQ(done->status, Status(Code::kAborted, "requests are running"));
}

TEST_F(CppClient, GivesUpARequestThatIsDropped) {
  Client client = ConnectClient();
  { ASSERT_OK_AND_ASSIGN(const Request claim, client.Claim()); }
  const auto first = agent_.Next(MessageType::kClaim);
  agent_.Send(MessageType::kClaimed, first.request, wire::Claimed());
  ASSERT_OK_AND_ASSIGN(const int fd, client.PollFd());
  pollfd item = {fd, POLLIN, 0};
  ASSERT_EQ(::poll(&item, 1, 10'000), 1);
  EXPECT_OK(client.Poll());
  agent_.Close();
  ASSERT_EQ(::poll(&item, 1, 10'000), 1);
  EXPECT_THAT(client.Poll(), IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST_F(CppClient, KeepsAnArenaAliveThatIsAttached) {
  Client client = ConnectClient();
  std::span<std::byte> memory;
  {
    ASSERT_OK_AND_ASSIGN(Arena arena, Arena::Create(4096));
    ASSERT_OK_AND_ASSIGN(memory, arena.Allocate(100));
    EXPECT_EQ(arena.used(), 100U);
    ASSERT_OK(client.Attach(arena));
  }
  memory[99] = std::byte{1};
  EXPECT_EQ(memory[99], std::byte{1});
  EXPECT_OK(client.DetachAll());
}

}  // namespace
}  // namespace tensorbus::client
