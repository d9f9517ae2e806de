#include "worker_shim/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tensorbus/base/byte_io.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_shim/wire_examples.h"

namespace tensorbus::wire {
namespace {

using tensorbus::testing::IsStatus;

std::string Hex(std::span<const std::byte> bytes) {
  std::string out;
  for (const std::byte b : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += kDigits[std::to_integer<unsigned>(b) >> 4U];
    out += kDigits[std::to_integer<unsigned>(b) & 15U];
  }
  return out;
}

template <typename Message>
class WireMessage : public ::testing::Test {};

using Messages = ::testing::Types<Hello, Welcome, AttachSegment, Register, Registered, Publish,
                                  RequestRelease, Released, Update, HookEvent, HookDone, Updated,
                                  BucketWork, BucketDone, AttachBucket, Claimed, Reply>;
TYPED_TEST_SUITE(WireMessage, Messages);

TYPED_TEST(WireMessage, SurvivesARoundTrip) {
  const auto body = Encode(Example<TypeParam>());
  ASSERT_OK_AND_ASSIGN(const TypeParam decoded, Decode<TypeParam>(body));
  EXPECT_EQ(Hex(Encode(decoded)), Hex(body));
  EXPECT_NE(Hex(body), Hex(Encode(TypeParam()))) << "the example sets every field";
}

TYPED_TEST(WireMessage, RefusesEveryTruncationAndATrailingByte) {
  auto body = Encode(Example<TypeParam>());
  for (std::size_t size = 0; size < body.size(); ++size) {
    EXPECT_THAT(Decode<TypeParam>(std::span(body).first(size)),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed))
        << "cut to " << size << " of " << body.size();
  }
  body.push_back(std::byte{0});
  EXPECT_THAT(Decode<TypeParam>(body), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TYPED_TEST(WireMessage, NeverCrashesOnAChangedByte) {
  const auto body = Encode(Example<TypeParam>());
  for (std::size_t at = 0; at < body.size(); ++at) {
    for (const unsigned flip : {0x01U, 0x80U, 0xffU}) {
      auto changed = body;
      changed[at] ^= static_cast<std::byte>(flip);
      const auto decoded = Decode<TypeParam>(changed);
      // Bytes 0 to 3 may be a protocol number, behind which everything is skipped.
      if (decoded.ok() && at >= 4) {
        EXPECT_EQ(Hex(Encode(*decoded)), Hex(changed));
      }
    }
  }
}

TEST(Wire, KeepsItsBytes) {
  // Golden bytes: if one of these changes, kProtocol must grow.
  EXPECT_EQ(Hex(Encode(Example<Hello>())),
            "040000000600000070"
            "6f6c6963790700000074726169"
            "6e657202"
            "01000000"
            "02000000"
            "03000000"
            "39300000"
            "04000000"
            "74657374");
  EXPECT_EQ(Hex(Encode(Example<Publish>())),
            "0700000000000000"
            "03"
            "02000000"
            "01"
            "05000000");
  EXPECT_EQ(Hex(Encode(Example<Update>())),
            "03"
            "0900000000000000"
            "e803000000000000");
  EXPECT_EQ(Hex(Encode(Example<Reply>())),
            "09"
            "01"
            "0b00000000000000"
            "03000000"
            "6f6c64");
  EXPECT_EQ(Hex(Encode(Example<BucketWork>())),
            "01000000"
            "01000000"
            "02000000"
            "01"
            "0600000000000000"
            "0700000000000000"
            "0300000000000000"
            "0400000000000000"
            "0500000000000000");
  EXPECT_EQ(Hex(Encode(Example<Registered>())),
            "09010b00000000000000030000006f6c64"
            "03"
            "0e00000070726976617465206d656d6f7279"
            "0000000000000440"
            "0400000000000000"
            "0700000000000000"
            "000000000000d03f"
            "000000000000e03f");
  EXPECT_EQ(Hex(Encode(Example<Register>())),
            "01000000"
            "01000000"
            "77"
            "04"
            "02"
            "0400000000000000"
            "0600000000000000"  // tensor
            "01000000"
            "0010000000000000"  // segment
            "01000000"
            "00000000"
            "00000000"
            "02"  // piece
            "0000000000000000"
            "0200000000000000"
            "0100000000000000"
            "0600000000000000"
            "4000000000000000"
            "0c00000000000000"
            "0200000000000000"
            "02"
            "04"
            "01"
            "01000000"
            "01000000"
            "78"
            "03"
            "0400000000000000"  // back
            "0700000000000000"
            "0900000000000000"
            "0700000000000000"
            "03"
            "02000000"
            "01"
            "05000000"
            "0b00000000000000");
}

TEST(Wire, RefusesAVersionHeldThatWasNotPublishedLast) {
  Register message = Example<Register>();
  for (const std::uint64_t held : {6U, 8U}) {
    message.back.held.version = Version{held};
    EXPECT_THAT(Decode<Register>(Encode(message)),
                IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  }
  message.back.held.version = {};
  EXPECT_OK(Decode<Register>(Encode(message)));
}

TEST(Wire, CarriesAnyStatus) {
  for (int reason = 0; reason <= static_cast<int>(Reason::kBusy); ++reason) {
    const Reply reply{Status(Code::kAborted, "why \xe2\x82\xac", static_cast<Reason>(reason), -5)};
    ASSERT_OK_AND_ASSIGN(const Reply decoded, Decode<Reply>(Encode(reply)));
    EXPECT_EQ(decoded.status, reply.status);
  }
  ASSERT_OK_AND_ASSIGN(const Reply ok, Decode<Reply>(Encode(Reply())));
  EXPECT_OK(ok.status);
}

TEST(Wire, LeavesTheMiddleOfLongTextsOut) {
  const std::string text =
      "checksum" + std::string(kMaxTextBytes, 'a') + " (trace: /run/traces/7.trace)";
  ASSERT_OK_AND_ASSIGN(const Reply decoded,
                       Decode<Reply>(Encode(Reply{Status(Code::kInternal, text)})));
  EXPECT_EQ(decoded.status.message().size(), kMaxTextBytes);
  EXPECT_THAT(decoded.status.message(), ::testing::StartsWith("checksumaaa"));
  EXPECT_THAT(decoded.status.message(), ::testing::EndsWith("aaa (trace: /run/traces/7.trace)"));
}

TEST(Wire, RefusesNamesBeyondTheBound) {
  Hello hello = Example<Hello>();
  hello.identity.job = std::string(kMaxNameBytes + 1, 'j');
  EXPECT_THAT(Decode<Hello>(Encode(hello)), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(Wire, NeverSizesAnAllocationByAHostileCount) {
  ByteWriter out;
  out.Put(std::uint32_t{0xffffffff});  // tensors of a registration
  out.Put(std::uint64_t{0});
  EXPECT_THAT(Decode<Register>(out.bytes()), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

TEST(Wire, LooksOnlyAtTheProtocolOfAnotherProtocol) {
  ByteWriter out;
  out.Put(kProtocol + 1);
  out.PutString("whatever comes after that number");
  ASSERT_OK_AND_ASSIGN(const Hello hello, Decode<Hello>(out.bytes()));
  EXPECT_EQ(hello.protocol, kProtocol + 1);
  ASSERT_OK_AND_ASSIGN(const Welcome welcome, Decode<Welcome>(out.bytes()));
  EXPECT_THAT(welcome.status, IsStatus(Code::kFailedPrecondition, Reason::kProtocolVersion));
}

TEST(Wire, RefusesValuesNoEnumHas) {
  auto body = Encode(Example<Update>());
  body[0] = std::byte{4};
  EXPECT_THAT(Decode<Update>(body), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
  body[0] = std::byte{0};
  EXPECT_THAT(Decode<Update>(body), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus::wire
