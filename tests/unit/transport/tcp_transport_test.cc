#include "tensorbus/transport/tcp_transport.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "tensorbus/base/hash.h"
#include "tensorbus/kernels/digest.h"
#include "tensorbus/transport/peer_log.h"
#include "tensorbus/transport/route_check.h"
#include "tests/testing/random_blocks.h"
#include "tests/testing/test_capability.h"
#include "tests/unit/transport/scripted_source.h"

namespace tensorbus::transport {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using tcp::FrameType;
using tcp::ScriptedEnd;
using tcp::ScriptedSource;
using testing::IsStatus;
using testing::Random;

constexpr char kToken[] = "a shared secret";
const RouteKey kKey = {.session = SessionId{3}, .source_rank = 1, .target_rank = 2};

std::unique_ptr<TcpTransport> Make(TcpOptions options = {}) {
  if (options.token.empty()) options.token = kToken;
  auto transport = TcpTransport::Create(std::move(options));
  TB_CHECK(transport.ok());
  return std::move(*transport);
}

StridedBlock Flat(std::vector<std::byte>& memory) {
  StridedBlock block;
  block.base = memory.data();
  block.rank = 1;
  block.extents[0] = memory.size();
  block.strides[0] = 1;
  block.stream_strides[0] = 1;
  block.key = {.a = 1, .b = 2};
  return block;
}

/// A source that StartPull() may read.
RouteEnd Open(const StridedBlock& block) {
  return {.blocks = {block}, .capability = testing::TestCapability()};
}

std::future<Result<PullResult>> StartPull(Transport& transport, RouteEnd target, std::string peer,
                                          Proof proof = Proof::kReadback,
                                          Nanos patience = seconds(30)) {
  const auto promise = std::make_shared<std::promise<Result<PullResult>>>();
  transport.Pull(kKey, std::move(target),
                 {.proof = proof,
                  .deadline = steady_clock::now() + patience,
                  .peer = std::move(peer),
                  .capability = testing::TestCapability()},
                 [promise](Result<PullResult> result) { promise->set_value(std::move(result)); });
  return promise->get_future();
}

Result<PullResult> Wait(std::future<Result<PullResult>> future) {
  if (future.wait_for(seconds(60)) != std::future_status::ready) {
    return Status(Code::kInternal, "the pull never ended");
  }
  return future.get();
}

TEST(TcpTransport, CreateRefusesWhatCannotWork) {
  EXPECT_THAT(TcpTransport::Create({}), IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(TcpTransport::Create({.listen = "localhost:0", .token = kToken}),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  EXPECT_THAT(TcpTransport::Create({.token = kToken, .window_bytes = 0}),
              IsStatus(Code::kInvalidArgument, Reason::kNone));
  EXPECT_THAT(TcpTransport::Create({.token = kToken, .staging = StagingBudget::Create(1000)}),
              IsStatus(Code::kResourceExhausted, Reason::kOutOfMemory));
  const auto taken = Make();
  const std::string address = taken->endpoint().substr(6);
  EXPECT_FALSE(TcpTransport::Create({.listen = address, .token = kToken}).ok());
}

TEST(TcpTransport, EndpointNamesThePortTheSystemPicked) {
  EXPECT_TRUE(Make()->endpoint().starts_with("tcp://127.0.0.1:"));
  const auto advertised = Make({.listen = "0.0.0.0:0", .advertise_host = "127.0.0.1"});
  EXPECT_TRUE(advertised->endpoint().starts_with("tcp://127.0.0.1:"));
  EXPECT_FALSE(advertised->endpoint().ends_with(":0"));
}

TEST(TcpTransport, StagesWithinTheBudgetForATensorLargerThanIt) {
  // 4 MiB of 2-byte runs on both sides; both transports share a budget of 128 KiB.
  const auto staging = StagingBudget::Create(128 << 10);
  const auto make = [&] {
    return Make({.window_bytes = 100'001,
                 .credit_bytes = 1 << 20,
                 .scratch_bytes = 30'001,
                 .staging = staging});
  };
  const auto source = make();
  const auto target = make();
  Random random(71);
  std::vector<std::byte> from(4 << 20);
  std::vector<std::byte> to(4 << 20);
  testing::FillRandom(random, from);
  StridedBlock block = Flat(from);
  block.rank = 2;
  block.item_bytes = 2;
  block.extents = {1 << 10, 1 << 11};
  block.stream_strides = {1 << 12, 2};
  block.strides = {2, 1 << 11};
  StridedBlock place = block;
  place.base = to.data();
  ASSERT_OK(source->Expose(kKey, Open(block)));
  ASSERT_OK(Wait(StartPull(*target, {.blocks = {place}}, source->endpoint())));
  EXPECT_EQ(from, to);
  EXPECT_LE(staging->used_bytes_max(), staging->limit_bytes());
  EXPECT_GT(staging->used_bytes_max(), 0U);
}

TEST(TcpTransport, KeepsWithinItsCreditWhateverItsBounds) {
  Random random(72);
  std::vector<std::byte> from(300'000);
  testing::FillRandom(random, from);
  for (const auto& [window, credit, streams] :
       {std::tuple{1U << 20, 1U, 3U}, std::tuple{1000U, 900U, 1U},
        std::tuple{7777U, 20'000U, 4U}}) {
    const auto source = Make({.io_threads = 1});
    const auto target = Make({.io_threads = 3,
                              .streams_per_peer = streams,
                              .window_bytes = window,
                              .credit_bytes = std::max(credit, 500U)});
    std::vector<std::byte> to(from.size());
    ASSERT_OK(source->Expose(kKey, Open(Flat(from))));
    ASSERT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, source->endpoint())));
    EXPECT_EQ(from, to);
  }
}

TEST(TcpTransport, PullsFromItselfWhenNoPeerIsNamed) {
  const auto transport = Make();
  std::vector<std::byte> from(5000, std::byte{7});
  std::vector<std::byte> to(5000);
  ASSERT_OK(transport->Expose(kKey, Open(Flat(from))));
  ASSERT_OK(Wait(StartPull(*transport, {.blocks = {Flat(to)}}, "")));
  EXPECT_EQ(from, to);
}

TEST(TcpTransport, RefusesAnotherToken) {
  const auto source = Make({.token = "one"});
  const auto target = Make({.token = "two"});
  const auto result = Wait(StartPull(*target, {}, source->endpoint()));
  EXPECT_THAT(result, IsStatus(Code::kUnauthenticated, Reason::kNone));
}

TEST(TcpTransport, RefusesHandshakesUntilItWasToldTheToken) {
  std::string token;
  Mutex mutex;
  const auto told = [&] {
    MutexLock lock(mutex);
    return token;
  };
  const auto tell = [&](std::string text) {
    MutexLock lock(mutex);
    token = std::move(text);
  };
  // One stream: another's refusal may come so late that it ends the pull after this one.
  const auto late = TcpTransport::Create({.token_source = told, .streams_per_peer = 1});
  ASSERT_OK(late);
  const auto knows = Make({.streams_per_peer = 1});
  for (const bool as_source : {true, false}) {
    TcpTransport& source = as_source ? **late : *knows;
    TcpTransport& target = as_source ? *knows : **late;
    std::vector<std::byte> from(100, std::byte{3});
    std::vector<std::byte> to(100);
    ASSERT_OK(source.Expose(kKey, Open(Flat(from))));
    tell("");
    const auto refused = Wait(StartPull(target, {.blocks = {Flat(to)}}, source.endpoint()));
    EXPECT_EQ(refused.status().code(), Code::kUnavailable) << refused.status();
    EXPECT_NE(refused.status().message().find("was not told the shared token yet"),
              std::string::npos)
        << refused.status();
    EXPECT_EQ(to, std::vector<std::byte>(100));
    tell(kToken);
    ASSERT_OK(Wait(StartPull(target, {.blocks = {Flat(to)}}, source.endpoint())));
    EXPECT_EQ(from, to);
  }
}

TEST(TcpTransport, RemembersSoManyPeersAndFindsForgottenOnesAgain) {
  const auto target = Make({.peers_max = 2});
  std::vector<std::unique_ptr<TcpTransport>> sources;
  std::vector<std::byte> from(100, std::byte{3});
  for (int i = 0; i < 5; ++i) {
    sources.push_back(Make());
    ASSERT_OK(sources.back()->Expose(kKey, Open(Flat(from))));
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& source : sources) {
      std::vector<std::byte> to(100);
      ASSERT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, source->endpoint())));
      EXPECT_EQ(from, to);
    }
  }
  // A pull lets go of its peer shortly after it is done: the last but one may be there still.
  EXPECT_LE(target->peer_count(), 3U);
}

/// Gives zeros and remembers until when it was waited for.
class RecordingMemory final : public ForeignMemory {
 public:
  std::uint64_t stage_bytes() const override { return 1 << 20; }
  Result<ForeignStage> Borrow(TimePoint) override {
    return Status(Code::kUnimplemented, "not lent here");
  }
  Status Read(std::span<const ForeignPart>, std::span<std::byte> out, TimePoint deadline) override {
    std::fill(out.begin(), out.end(), std::byte{0});
    MutexLock lock(mutex_);
    deadline_ = deadline;
    return {};
  }
  Status Write(std::span<const ForeignPart>, std::span<const std::byte>, TimePoint) override {
    return {Code::kUnimplemented, "not written here"};
  }
  TimePoint deadline() const {
    MutexLock lock(mutex_);
    return deadline_;
  }

 private:
  mutable Mutex mutex_;
  TimePoint deadline_ TB_GUARDED_BY(mutex_);
};

TEST(TcpTransport, WaitsForForeignSourcesUntilTheirSessionsDeadline) {
  const auto source = Make();
  const auto target = Make();
  const auto memory = std::make_shared<RecordingMemory>();
  std::vector<std::byte> from(100);
  std::vector<std::byte> to(100, std::byte{1});
  const TimePoint deadline = steady_clock::now() + std::chrono::hours(2);
  ASSERT_OK(source->Expose(kKey, {.blocks = {Flat(from)},
                                  .memory = memory,
                                  .deadline = deadline,
                                  .capability = testing::TestCapability()}));
  ASSERT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, source->endpoint())));
  EXPECT_EQ(to, from);
  EXPECT_EQ(memory->deadline(), deadline);
}

TEST(TcpTransport, SourceRefusesATargetWithoutTheToken) {
  const auto source = Make();
  ScriptedEnd end = tcp::ConnectTo(source->endpoint());
  end.Send(tcp::Encode(tcp::Hello{}));
  const auto challenge = end.Receive();
  ASSERT_TRUE(challenge.has_value());
  ASSERT_EQ(challenge->first, FrameType::kChallenge);
  // What the source itself proved is no proof of the target.
  ASSERT_OK_AND_ASSIGN(const tcp::Challenge parsed, tcp::ParseChallenge(challenge->second));
  end.Send(tcp::Encode(tcp::Answer{.mac = parsed.mac}));
  const auto refusal = end.Receive();
  ASSERT_TRUE(refusal.has_value());
  ASSERT_EQ(refusal->first, FrameType::kRefusal);
  ASSERT_OK_AND_ASSIGN(const tcp::Failure failure, tcp::ParseFailure(refusal->second));
  EXPECT_THAT(failure.status, IsStatus(Code::kUnauthenticated, Reason::kNone));
  EXPECT_FALSE(end.Receive().has_value());
}

TEST(TcpTransport, AProofOfTheCapabilityServesForItsRouteOnItsConnectionOnly) {
  const auto source = Make();
  std::vector<std::byte> from(100, std::byte{3});
  ASSERT_OK(source->Expose(kKey, Open(Flat(from))));
  ASSERT_OK_AND_ASSIGN(const tcp::Nonce own, tcp::MakeNonce());
  ScriptedEnd end = tcp::ConnectTo(source->endpoint());
  end.Send(tcp::Encode(tcp::Hello{.nonce = own}));
  const auto challenge = end.Receive();
  ASSERT_TRUE(challenge.has_value());
  ASSERT_OK_AND_ASSIGN(const tcp::Challenge parsed, tcp::ParseChallenge(challenge->second));
  end.Send(tcp::Encode(tcp::Answer{.mac = tcp::TargetMac(kToken, own, parsed.nonce)}));
  ASSERT_TRUE(end.Receive().has_value());  // kWelcome
  const Capability capability = testing::TestCapability();
  const RouteKey other = {.session = kKey.session, .source_rank = 1, .target_rank = 3};
  const RouteEnd target = {.blocks = {Flat(from)}};
  tcp::Request request = {.id = 1,
                          .key = kKey,
                          .shape = ShapeOf(target),
                          .blocks = 1,
                          .bytes = 100,
                          .proof = Proof::kReadback,
                          .first = 0,
                          .count = 100};
  for (const tcp::Mac& mac : {tcp::Mac{}, tcp::PullMac(capability, parsed.nonce, own, kKey),
                              tcp::PullMac(capability, own, own, kKey),
                              tcp::PullMac(capability, own, parsed.nonce, other),
                              tcp::PullMac({}, own, parsed.nonce, kKey)}) {
    request.mac = mac;
    end.Send(tcp::Encode(request));
    const auto failure = end.Receive();
    ASSERT_TRUE(failure.has_value());
    ASSERT_EQ(failure->first, FrameType::kFailure);
    ASSERT_OK_AND_ASSIGN(const tcp::Failure why, tcp::ParseFailure(failure->second));
    EXPECT_EQ(why.status.code(), Code::kPermissionDenied);
  }
  request.mac = tcp::PullMac(capability, own, parsed.nonce, kKey);
  end.Send(tcp::Encode(request));
  const auto data = end.Receive();
  ASSERT_TRUE(data.has_value());
  EXPECT_EQ(data->first, FrameType::kData);
}

TEST(TcpTransport, RefusesAnotherProtocolVersionOnBothSides) {
  const auto transport = Make();
  ScriptedEnd end = tcp::ConnectTo(transport->endpoint());
  end.Send(tcp::Encode(tcp::Hello{.version = 99}));
  const auto refusal = end.Receive();
  ASSERT_TRUE(refusal.has_value());
  ASSERT_OK_AND_ASSIGN(const tcp::Failure failure, tcp::ParseFailure(refusal->second));
  EXPECT_THAT(failure.status, IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));

  ScriptedSource source;
  auto result = StartPull(*transport, {}, source.endpoint());
  ScriptedEnd accepted = source.Accept();
  accepted.Receive();
  accepted.Send(tcp::Encode(tcp::Challenge{.version = 98}));
  EXPECT_THAT(Wait(std::move(result)),
              IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
}

TEST(TcpTransport, PassesOnWhyTheSourceRefused) {
  const auto transport = Make({.streams_per_peer = 1});
  ScriptedSource source;
  auto result = StartPull(*transport, {}, source.endpoint());
  ScriptedEnd accepted = source.Accept();
  accepted.Receive();
  accepted.Send(
      tcp::EncodeRefusal(Status(Code::kFailedPrecondition, "speaks 7", Reason::kProtocolVersion)));
  EXPECT_THAT(Wait(std::move(result)),
              IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
}

TEST(TcpTransport, HostileBytesEndTheirConnectionOnly) {
  ::testing::internal::CaptureStderr();
  const auto source = Make();
  Random random(73);
  for (int round = 0; round < 60; ++round) {
    ScriptedEnd end = tcp::ConnectTo(source->endpoint());
    std::vector<std::byte> bytes(testing::Pick(random, 1, 300));
    testing::FillRandom(random, bytes);
    if (round % 3 == 1) bytes = tcp::Encode(tcp::Request{});  // before the handshake
    if (round % 3 == 2) {
      bytes = tcp::Encode(tcp::Hello{});
      bytes[testing::Pick(random, 0, bytes.size() - 1)] ^= std::byte{0x40};
    }
    end.Send(bytes);
  }
  std::vector<std::byte> from(100, std::byte{1});
  std::vector<std::byte> to(100);
  const auto target = Make();
  ASSERT_OK(source->Expose(kKey, Open(Flat(from))));
  ASSERT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, source->endpoint())));
  EXPECT_EQ(from, to);
  const std::string log = ::testing::internal::GetCapturedStderr();
  std::size_t lines = 0;
  for (std::size_t at = 0; (at = log.find("tcp_connection_", at)) != std::string::npos; ++at) {
    ++lines;
  }
  EXPECT_GT(lines, 0U);
  EXPECT_LE(lines, 2 * PeerLog::kLinesMax) << log;  // should a period end in between
}

TEST(TcpTransport, ASilentConnectionIsDroppedAfterTheHandshakeTimeout) {
  const auto source = Make({.handshake_timeout = milliseconds(30)});
  ScriptedEnd end = tcp::ConnectTo(source->endpoint());
  EXPECT_FALSE(end.Receive().has_value());
}

TEST(TcpTransport, AnUnreachablePeerIsLostAtOnce) {
  const auto target = Make();
  std::string endpoint;
  {
    const ScriptedSource gone;
    endpoint = gone.endpoint();
  }
  const auto result = Wait(StartPull(*target, {}, endpoint));
  EXPECT_THAT(result, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_NE(result.status().message().find(endpoint), std::string::npos) << result.status();
  EXPECT_THAT(Wait(StartPull(*target, {}, "tcp://somewhere:1")),
              IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(TcpTransport, APeerThatNeverAnswersCostsTheDeadlineAtMost) {
  const auto target = Make();
  const ScriptedSource silent;
  const auto late = Wait(StartPull(*target, {}, silent.endpoint(), Proof::kOff, milliseconds(50)));
  EXPECT_THAT(late, IsStatus(Code::kDeadlineExceeded, Reason::kNone));
  EXPECT_NE(late.status().message().find("session 3 route 1 -> 2"), std::string::npos);
  EXPECT_NE(late.status().message().find(silent.endpoint()), std::string::npos);
  const auto hasty = Make({.handshake_timeout = milliseconds(30)});
  EXPECT_THAT(Wait(StartPull(*hasty, {}, silent.endpoint())),
              IsStatus(Code::kUnavailable, Reason::kPeerLost));
}

TEST(TcpTransport, AReturningPeerIsFoundAgain) {
  const auto target = Make();
  std::vector<std::byte> from(5000, std::byte{9});
  std::vector<std::byte> to(5000);
  auto source = Make();
  const std::string endpoint = source->endpoint();
  ASSERT_OK(source->Expose(kKey, Open(Flat(from))));
  ASSERT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, endpoint)));
  source.reset();
  // Once the target has noticed, a pull either finds the old connection broken or nobody there.
  EXPECT_THAT(Wait(StartPull(*target, {.blocks = {Flat(to)}}, endpoint)),
              IsStatus(Code::kUnavailable, Reason::kPeerLost));
  source = Make({.listen = endpoint.substr(6)});
  ASSERT_OK(source->Expose(kKey, Open(Flat(from))));
  EXPECT_OK(Wait(StartPull(*target, {.blocks = {Flat(to)}}, endpoint)));
}

/// A source whose answers the test writes: one connection, one window.
class ScriptedAnswer : public ::testing::Test {
 protected:
  ScriptedAnswer() : memory_(1000), target_(Make({.streams_per_peer = 1})) {
    Random random(74);
    payload_.resize(memory_.size());
    testing::FillRandom(random, payload_);
    std::vector<std::byte> copy = payload_;
    const DigestSum sum = kernels::DigestBlock(Flat(copy));
    trailer_ = {.id = 1, .checksum = Checksum64(payload_), .parts = {{sum.a, sum.b}}};
  }
  /// Starts the pull and reads its request.
  ScriptedEnd Begin(Proof proof = Proof::kReadback) {
    return Begin(proof, {.blocks = {Flat(memory_)}});
  }
  ScriptedEnd Begin(Proof proof, RouteEnd target) {
    result_ = StartPull(*target_, std::move(target), source_.endpoint(), proof);
    ScriptedEnd end = source_.AcceptTrusted(kToken);
    const auto request = end.Receive();
    TB_CHECK(request.has_value() && request->first == FrameType::kRequest);
    const auto parsed = tcp::ParseRequest(request->second);
    TB_CHECK(parsed.ok() && parsed->key == kKey && parsed->count == 1000 && parsed->id == 1);
    return end;
  }
  Result<PullResult> End() { return Wait(std::move(result_)); }

  std::vector<std::byte> memory_;
  std::vector<std::byte> payload_;
  tcp::Trailer trailer_;
  tcp::Data data_ = {.id = 1, .first = 0, .count = 1000};
  ScriptedSource source_;
  std::unique_ptr<TcpTransport> target_;
  std::future<Result<PullResult>> result_;
};

TEST_F(ScriptedAnswer, ASoundAnswerLands) {
  ScriptedEnd end = Begin();
  end.Send(tcp::Encode(data_));
  end.Send(std::span(payload_).first(300));
  end.Send(std::span(payload_).subspan(300));
  end.Send(tcp::Encode(trailer_));
  EXPECT_OK(End());
  EXPECT_EQ(memory_, payload_);
}

TEST_F(ScriptedAnswer, ABitFlippedOnTheWireIsRefusedEvenWithoutProof) {
  for (const Proof proof : {Proof::kOff, Proof::kStream, Proof::kReadback}) {
    ScriptedEnd end = Begin(proof);
    end.Send(tcp::Encode(data_));
    payload_[500] ^= std::byte{4};
    end.Send(payload_);
    payload_[500] ^= std::byte{4};
    end.Send(tcp::Encode(trailer_));
    EXPECT_THAT(End(), IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
    end.Close();
    target_ = Make({.streams_per_peer = 1});
  }
}

TEST_F(ScriptedAnswer, TheBlockWithTheFlippedBitIsNamedWhereSumsTell) {
  const auto halves = [](std::vector<std::byte>& memory) {
    StridedBlock first = Flat(memory);
    StridedBlock second = first;
    first.extents[0] = 600;
    second.base += 600;
    second.extents[0] = 400;
    return std::vector{first, second};
  };
  trailer_.parts.clear();
  for (const StridedBlock& half : halves(payload_)) {
    const DigestSum sum = kernels::DigestBlock(half);
    trailer_.parts.push_back({sum.a, sum.b});
  }
  using Named = std::optional<std::uint32_t>;
  for (const auto& [proof, at, named] :
       {std::tuple{Proof::kOff, 700U, Named()}, std::tuple{Proof::kStream, 599U, Named(0)},
        std::tuple{Proof::kStream, 600U, Named(1)}, std::tuple{Proof::kReadback, 999U, Named(1)}}) {
    ScriptedEnd end = Begin(proof, {.blocks = halves(memory_)});
    end.Send(tcp::Encode(data_));
    payload_[at] ^= std::byte{4};
    end.Send(payload_);
    payload_[at] ^= std::byte{4};
    end.Send(tcp::Encode(trailer_));
    const auto result = End();
    EXPECT_THAT(result, IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
    EXPECT_EQ(MismatchedBlock(result.status()), named) << result.status();
    end.Close();
    target_ = Make({.streams_per_peer = 1});
  }
}

TEST_F(ScriptedAnswer, SumsThatDoNotFitTheBytesAreRefusedByReadback) {
  ScriptedEnd end = Begin();
  trailer_.parts[0].b ^= 1;
  end.Send(tcp::Encode(data_));
  end.Send(payload_);
  end.Send(tcp::Encode(trailer_));
  EXPECT_THAT(End(), IsStatus(Code::kDataLoss, Reason::kChecksumMismatch));
}

TEST_F(ScriptedAnswer, AnswersOutOfLineAreMalformed) {
  const auto malformed = IsStatus(Code::kInvalidArgument, Reason::kMalformed);
  tcp::Data other = data_;
  other.count = 999;
  tcp::Trailer parts = trailer_;
  parts.parts.push_back({});
  const std::vector<std::vector<std::vector<std::byte>>> answers = {
      {tcp::Encode(other)},
      {tcp::Encode(trailer_)},
      {tcp::Encode(data_), payload_, tcp::Encode(data_)},
      {tcp::Encode(data_), payload_, tcp::Encode(parts)},
      {tcp::EncodeFailure(2, Status(Code::kNotFound, "another"))},
      {tcp::EncodeWelcome()},
      {std::vector<std::byte>(8, std::byte{0xff})},
  };
  for (std::size_t i = 0; i < answers.size(); ++i) {
    SCOPED_TRACE(i);
    ScriptedEnd end = Begin();
    for (const auto& bytes : answers[i]) end.Send(bytes);
    EXPECT_THAT(End(), malformed);
    target_ = Make({.streams_per_peer = 1});
  }
}

TEST_F(ScriptedAnswer, APeerLostInMidWindowIsTypedAtOnce) {
  ScriptedEnd end = Begin();
  end.Send(tcp::Encode(data_));
  end.Send(std::span(payload_).first(400));
  end.Close();
  const auto result = End();
  EXPECT_THAT(result, IsStatus(Code::kUnavailable, Reason::kPeerLost));
  EXPECT_NE(result.status().message().find("session 3 route 1 -> 2"), std::string::npos);
}

TEST_F(ScriptedAnswer, ACancelledPullLeavesTheMemoryAloneAndTheConnectionUsable) {
  ScriptedEnd end = Begin();
  end.Send(tcp::Encode(data_));
  end.Send(std::span(payload_).first(400));
  target_->Cancel(SessionId{3});
  EXPECT_THAT(End(), IsStatus(Code::kCancelled, Reason::kCancelled));
  const std::vector<std::byte> after = memory_;
  result_ = StartPull(*target_, {.blocks = {Flat(memory_)}}, source_.endpoint());
  end.Send(std::vector<std::byte>(600, std::byte{0xee}));
  end.Send(tcp::Encode(trailer_));
  ASSERT_TRUE(end.Receive().has_value());  // the second request: the first answer is through
  EXPECT_EQ(memory_, after);
  data_.id = trailer_.id = 2;
  end.Send(tcp::Encode(data_));
  end.Send(payload_);
  end.Send(tcp::Encode(trailer_));
  EXPECT_OK(End());
  EXPECT_EQ(memory_, payload_);
}

}  // namespace
}  // namespace tensorbus::transport
