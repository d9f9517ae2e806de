#include "tensorbus/base/printable.h"

#include <gtest/gtest.h>

namespace tensorbus {
namespace {

TEST(Printable, LeavesTextOfAllKindsAsItIs) {
  for (const char* text :
       {"", "model.layers.0.mlp", "größer", "重み", "\xf0\x9f\x9a\x80", " \"=\\"}) {
    EXPECT_TRUE(IsPrintable(text)) << text;
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(Printable, ShowsWhatATerminalWouldActOn) {
  const std::pair<std::string_view, const char*> kCases[] = {
      {"a\x1b[2Jb", "a\\x1b[2Jb"},
      {"\n\t\x7f", "\\n\\x09\\x7f"},
      {std::string_view("\0", 1), "\\x00"},
      {"\xc2\x9bK", "\\u{009b}K"},  // CSI in one character
      {"\xc2\x85", "\\u{0085}"},
      {"\xe2\x80\xa8\xe2\x80\xa9", "\\u{2028}\\u{2029}"},
      {"\xe2\x80\xaegpj.exe", "\\u{202e}gpj.exe"},
      {"\xe2\x80\xaa\xe2\x81\xa6\xe2\x81\xa9", "\\u{202a}\\u{2066}\\u{2069}"},
      {"\xe2\x80\x8f\xd8\x9c", "\\u{200f}\\u{061c}"},
  };
  for (const auto& [text, shown] : kCases) {
    EXPECT_FALSE(IsPrintable(text)) << shown;
    EXPECT_EQ(Printable(text), shown);
  }
}

TEST(Printable, ShowsTheBytesOfWhatIsNotUtf8) {
  const std::pair<const char*, const char*> kCases[] = {
      {"\x9bK", "\\x9bK"},                           // CSI of an eight-bit terminal
      {"\xff", "\\xff"},                             // never in UTF-8
      {"\xc3", "\\xc3"},                             // cut short
      {"\xe2\x80", "\\xe2\\x80"},                    // cut short
      {"\xc3(", "\\xc3("},                           // no continuation
      {"\xc0\x9b", "\\xc0\\x9b"},                    // overlong
      {"\xe0\x82\x9b", "\\xe0\\x82\\x9b"},           // overlong
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond Unicode
  };
  for (const auto& [text, shown] : kCases) {
    EXPECT_FALSE(IsPrintable(text)) << shown;
    EXPECT_EQ(Printable(text), shown);
  }
}

TEST(Shortened, LeavesWhatFitsAsItIs) {
  EXPECT_EQ(Shortened("", 0), "");
  EXPECT_EQ(Shortened("a remedy", 8), "a remedy");
  const std::string whole(64, 'x');
  EXPECT_EQ(Shortened(whole, 64), whole);
}

TEST(Shortened, KeepsTheBeginningAndTheEnd) {
  const std::string text =
      "session 3 failed: " + std::string(5000, '.') + " (trace: /tmp/tensorbus-0/traces/3.trace)";
  for (const std::size_t bytes : {100U, 1000U, 4000U}) {
    const std::string shown = Shortened(text, bytes);
    EXPECT_EQ(shown.size(), bytes);
    EXPECT_EQ(shown.rfind("session 3 failed: ", 0), 0U) << shown;
    EXPECT_NE(shown.find("[...]"), std::string::npos);
    const std::string end = " (trace: /tmp/tensorbus-0/traces/3.trace)";
    EXPECT_EQ(shown.substr(shown.size() - end.size()), end);
  }
}

TEST(Shortened, SplitsNoCharacter) {
  for (const std::string_view character : {"\xc3\xb6", "\xe2\x82\xac", "\xf0\x9f\x9a\x80"}) {
    std::string text;
    for (int i = 0; i < 300; ++i) text += character;
    for (std::size_t bytes = 0; bytes < 300; ++bytes) {
      const std::string shown = Shortened(text, bytes);
      EXPECT_LE(shown.size(), bytes);
      EXPECT_GE(shown.size() + 6, bytes) << "no more than it must";
      EXPECT_TRUE(IsPrintable(shown)) << bytes;
    }
  }
}

TEST(Shortened, KeepsItsBoundForBytesThatAreNoCharacters) {
  const std::string text(500, '\x80');
  for (const std::size_t bytes : {0U, 1U, 63U, 64U, 200U, 499U}) {
    EXPECT_LE(Shortened(text, bytes).size(), bytes);
  }
}

}  // namespace
}  // namespace tensorbus
