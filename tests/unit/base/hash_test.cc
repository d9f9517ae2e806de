#include "tensorbus/base/hash.h"

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

TEST(Hash128, MatchesThePublishedValueOfTheEmptyInput) {
  EXPECT_EQ(HashOf("").ToHex(), "99aa06d3014798d86001c324468d497f");
}

TEST(Hash128, HexRoundTrips) {
  const Hash128 hash = HashOf("tensorbus");
  ASSERT_OK_AND_ASSIGN(const Hash128 back, Hash128::FromHex(hash.ToHex()));
  EXPECT_EQ(back, hash);
}

TEST(Hash128, RefusesWhatIsNotHex) {
  EXPECT_FALSE(Hash128::FromHex("12").ok());
  EXPECT_FALSE(Hash128::FromHex(std::string(31, '0') + "g").ok());
}

TEST(Hasher, StringsDoNotCollideByConcatenation) {
  Hasher a;
  a.AddString("ab");
  a.AddString("c");
  Hasher b;
  b.AddString("a");
  b.AddString("bc");
  EXPECT_NE(a.Finish(), b.Finish());
}

TEST(Hasher, PiecesAddUpToTheWhole) {
  Hasher pieces;
  pieces.AddBytes(std::as_bytes(std::span("tensor", 6)));
  pieces.AddBytes(std::as_bytes(std::span("bus", 3)));
  EXPECT_EQ(pieces.Finish(), HashOf("tensorbus"));
}

TEST(Checksum64Stream, AnyCutGivesTheChecksumOfTheWhole) {
  const std::string text(1000, 'x');
  const auto bytes = std::as_bytes(std::span(text));
  Checksum64Stream stream;
  for (int round = 0; round < 2; ++round) {
    stream.Reset();
    stream.Add(bytes.first(7));
    stream.Add({});
    stream.Add(bytes.subspan(7));
    EXPECT_EQ(stream.Finish(), Checksum64(bytes));
  }
  stream.Reset();
  EXPECT_EQ(stream.Finish(), Checksum64({}));
}

}  // namespace
}  // namespace tensorbus
