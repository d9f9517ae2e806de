#include "tensorbus/transport/tcp_frame.h"

#include <string>

#include "tensorbus/transport/tcp_auth.h"
#include "tensorbus/transport/tcp_socket.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/test_capability.h"

namespace tensorbus::transport::tcp {
namespace {

using testing::IsStatus;

std::span<const std::byte> Body(const std::vector<std::byte>& frame) {
  return std::span(frame).subspan(kFrameHeaderBytes);
}

Result<FrameHeader> Header(const std::vector<std::byte>& frame) {
  return ParseHeader(std::span(frame).first<kFrameHeaderBytes>());
}

TEST(TcpFrame, RequestsRoundTripAndKeepTheirBytes) {
  const Request request = {.id = 1,
                           .key = {SessionId{2}, 3, 4},
                           .shape = 5,
                           .blocks = 6,
                           .bytes = 100,
                           .proof = Proof::kStream,
                           .first = 7,
                           .count = 93,
                           .mac = {std::byte{8}}};
  const auto frame = Encode(request);
  ASSERT_OK_AND_ASSIGN(const FrameHeader header, Header(frame));
  EXPECT_EQ(header.type, FrameType::kRequest);
  EXPECT_EQ(header.body_bytes, frame.size() - kFrameHeaderBytes);
  ASSERT_OK_AND_ASSIGN(const Request back, ParseRequest(Body(frame)));
  EXPECT_EQ(back.key, request.key);
  EXPECT_EQ(back.count, 93U);
  EXPECT_EQ(back.proof, Proof::kStream);
  EXPECT_EQ(back.mac, request.mac);
  EXPECT_EQ(frame[frame.size() - kMacBytes], std::byte{8});
  // Golden: a change of these bytes is a new protocol version.
  const unsigned char golden[] = {6, 0, 0, 0, 93, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
                                  0, 2, 0, 0, 0,  0, 0, 0, 0, 3, 0, 0, 0, 4, 0,
                                  0, 0, 5, 0, 0,  0, 0, 0, 0, 0, 6, 0, 0, 0};
  for (std::size_t i = 0; i < sizeof golden; ++i) {
    EXPECT_EQ(static_cast<unsigned char>(frame[i]), golden[i]) << i;
  }
}

TEST(TcpFrame, RefusesRangesOutsideTheRoute) {
  const auto malformed = IsStatus(Code::kInvalidArgument, Reason::kMalformed);
  Request request = {.bytes = 100, .first = 50, .count = 51};
  EXPECT_THAT(ParseRequest(Body(Encode(request))), malformed);
  request.first = ~std::uint64_t{0};
  EXPECT_THAT(ParseRequest(Body(Encode(request))), malformed);
  request = {.bytes = ~std::uint64_t{0}, .first = 0, .count = kWindowBytesMax + 1};
  EXPECT_THAT(ParseRequest(Body(Encode(request))), malformed);
  request = {.proof = static_cast<Proof>(9)};
  EXPECT_THAT(ParseRequest(Body(Encode(request))), malformed);
}

TEST(TcpFrame, RefusesUnknownTypesAndOversizedBodies) {
  const auto malformed = IsStatus(Code::kInvalidArgument, Reason::kMalformed);
  auto frame = EncodeWelcome();
  frame[0] = std::byte{10};
  EXPECT_THAT(Header(frame), malformed);
  frame[0] = std::byte{0};
  EXPECT_THAT(Header(frame), malformed);
  frame = EncodeWelcome();
  frame[1] = std::byte{1};
  EXPECT_THAT(Header(frame), malformed);
  frame = EncodeWelcome();
  frame[7] = std::byte{1};
  EXPECT_THAT(Header(frame), malformed);
}

TEST(TcpFrame, TrailersAreBounded) {
  Trailer trailer = {.id = 3, .checksum = 4, .parts = {{5, 6}, {7, 8}}};
  ASSERT_OK_AND_ASSIGN(const Trailer back, ParseTrailer(Body(Encode(trailer))));
  ASSERT_EQ(back.parts.size(), 2U);
  EXPECT_EQ(back.parts[1].b, 8U);
  auto frame = Encode(trailer);
  frame[kFrameHeaderBytes + 16] = std::byte{3};  // claims a part that is not there
  EXPECT_THAT(ParseTrailer(Body(frame)), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  trailer.parts.resize(kPartsMax);
  EXPECT_OK(Header(Encode(trailer)));
  trailer.parts.resize(kPartsMax + 1);
  EXPECT_THAT(Header(Encode(trailer)), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(TcpFrame, FailuresKeepCodeAndReasonAndAreMadePrintable) {
  const Status status(Code::kNotFound, std::string("no\n route") + std::string(2000, 'x'),
                      Reason::kPlanMismatch);
  ASSERT_OK_AND_ASSIGN(const Failure back, ParseFailure(Body(EncodeFailure(9, status))));
  EXPECT_EQ(back.id, 9U);
  EXPECT_THAT(back.status, IsStatus(Code::kNotFound, Reason::kPlanMismatch));
  EXPECT_EQ(back.status.message().substr(0, 9), "no? route");
  EXPECT_EQ(back.status.message().size(), kMessageBytesMax);
  auto frame = EncodeFailure(9, status);
  frame[kFrameHeaderBytes + 8] = std::byte{0};     // claims success
  frame[kFrameHeaderBytes + 9] = std::byte{0xff};  // no such reason
  ASSERT_OK_AND_ASSIGN(const Failure odd, ParseFailure(Body(frame)));
  EXPECT_THAT(odd.status, IsStatus(Code::kUnknown, Reason::kNone));
}

TEST(TcpAuth, ProofsDependOnTokenSideAndNonces) {
  ASSERT_OK_AND_ASSIGN(const Nonce one, MakeNonce());
  ASSERT_OK_AND_ASSIGN(const Nonce two, MakeNonce());
  EXPECT_NE(one, two);
  const Mac mac = SourceMac("secret", one, two);
  EXPECT_TRUE(SameMac(mac, SourceMac("secret", one, two)));
  EXPECT_FALSE(SameMac(mac, SourceMac("Secret", one, two)));
  EXPECT_FALSE(SameMac(mac, SourceMac("secret", two, one)));
  EXPECT_FALSE(SameMac(mac, TargetMac("secret", one, two)));
}

TEST(TcpAuth, PullProofsDependOnCapabilityNoncesAndRoute) {
  ASSERT_OK_AND_ASSIGN(const Nonce one, MakeNonce());
  ASSERT_OK_AND_ASSIGN(const Nonce two, MakeNonce());
  const Capability capability = testing::TestCapability();
  const RouteKey key = {SessionId{2}, 3, 4};
  const Mac mac = PullMac(capability, one, two, key);
  EXPECT_TRUE(SameMac(mac, PullMac(capability, one, two, key)));
  EXPECT_FALSE(SameMac(mac, PullMac(testing::TestCapability('d'), one, two, key)));
  EXPECT_FALSE(SameMac(mac, PullMac({}, one, two, key)));
  EXPECT_FALSE(SameMac(mac, PullMac(capability, two, one, key)));
  EXPECT_FALSE(SameMac(mac, PullMac(capability, one, two, {SessionId{1}, 3, 4})));
  EXPECT_FALSE(SameMac(mac, PullMac(capability, one, two, {SessionId{2}, 4, 3})));
}

TEST(Capability, OpensItselfOnlyAndNoneOpensNothing) {
  EXPECT_TRUE(testing::TestCapability('a').Opens(testing::TestCapability('a')));
  EXPECT_FALSE(testing::TestCapability('a').Opens(testing::TestCapability('b')));
  EXPECT_FALSE(Capability().Opens(testing::TestCapability('a')));
  EXPECT_FALSE(testing::TestCapability('a').Opens(Capability()));
  EXPECT_FALSE(Capability().Opens(Capability()));
  for (const std::size_t bytes : {0U, 31U, 33U}) {
    EXPECT_THAT(Capability::FromBytes(std::string(bytes, 'a')),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  }
}

TEST(TcpAddress, TakesNumericHostsOnly) {
  ASSERT_OK_AND_ASSIGN(const Address v4, ParseAddress("tcp://10.0.0.1:4711"));
  EXPECT_EQ(v4.host, "10.0.0.1");
  EXPECT_EQ(v4.port, 4711);
  ASSERT_OK_AND_ASSIGN(const Address v6, ParseAddress("[::1]:80"));
  EXPECT_EQ(v6.host, "::1");
  EXPECT_EQ(v6.ToString(), "[::1]:80");
  for (const char* bad : {"", "tcp://", "host:1", "10.0.0.1", "10.0.0.1:", "10.0.0.1:70000",
                          "10.0.0.1:1x", "shm://10.0.0.1:1"}) {
    EXPECT_THAT(ParseAddress(bad), IsStatus(Code::kInvalidArgument, Reason::kMalformed)) << bad;
  }
}

}  // namespace
}  // namespace tensorbus::transport::tcp
