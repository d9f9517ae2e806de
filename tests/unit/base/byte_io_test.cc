#include "tensorbus/base/byte_io.h"

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

using testing::IsStatus;

TEST(ByteIo, RoundTrips) {
  ByteWriter writer;
  writer.Put<std::uint8_t>(7);
  writer.Put<std::uint64_t>(1ULL << 60);
  writer.PutString("layers.0");
  ByteReader reader(writer.bytes());
  EXPECT_EQ(reader.Get<std::uint8_t>(), 7);
  EXPECT_EQ(reader.Get<std::uint64_t>(), 1ULL << 60);
  EXPECT_EQ(reader.GetString(100), "layers.0");
  EXPECT_OK(reader.Finish("record"));
}

TEST(ByteIo, EveryTruncationIsAFailureAndNeverACrash) {
  ByteWriter writer;
  writer.PutString("name");
  writer.Put<std::uint32_t>(3);
  for (std::size_t keep = 0; keep < writer.size(); ++keep) {
    ByteReader reader(std::span(writer.bytes()).first(keep));
    (void)reader.GetString(100);
    (void)reader.Get<std::uint32_t>();
    EXPECT_THAT(reader.Finish("record"), IsStatus(Code::kInvalidArgument, Reason::kMalformed))
        << keep;
  }
}

TEST(ByteIo, LongStringsAndHostileCountsAreRefused) {
  ByteWriter writer;
  writer.PutString("a long name");
  EXPECT_EQ(ByteReader(writer.bytes()).GetString(4), "");

  ByteWriter counts;
  counts.Put<std::uint32_t>(0xffffffff);
  ByteReader reader(counts.bytes());
  EXPECT_EQ(reader.GetCount(8), 0U);
  EXPECT_TRUE(reader.failed());
}

TEST(ByteIo, TrailingBytesAreAFailure) {
  ByteWriter writer;
  writer.Put<std::uint16_t>(1);
  ByteReader reader(writer.bytes());
  (void)reader.Get<std::uint8_t>();
  EXPECT_THAT(reader.Finish("record"), IsStatus(Code::kInvalidArgument, Reason::kMalformed));
}

}  // namespace
}  // namespace tensorbus
