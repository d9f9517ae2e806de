#include "tensorbus/base/log.h"

#include "tests/testing/status_matchers.h"

namespace tensorbus {
namespace {

TEST(Log, QuotesValuesThatWouldBreakTheLine) {
  EXPECT_EQ(internal::LogValue("plain"), "plain");
  EXPECT_EQ(internal::LogValue(""), "\"\"");
  EXPECT_EQ(internal::LogValue("two words"), "\"two words\"");
  EXPECT_EQ(internal::LogValue("a\"b\nc"), "\"a\\\"b\\nc\"");
}

TEST(Log, EscapesWhatATerminalWouldActOn) {
  EXPECT_EQ(internal::LogValue("a\r\x1b[2J\x7f"), "\"a\\x0d\\x1b[2J\\x7f\"");
  EXPECT_EQ(internal::LogValue("\t"), "\"\\x09\"");
  EXPECT_EQ(internal::LogValue("\xc2\x9bK"), "\"\\u{009b}K\"");
  EXPECT_EQ(internal::LogValue("r\xc3\xa9sum\xc3\xa9"), "r\xc3\xa9sum\xc3\xa9") << "UTF-8 stays";
}

TEST(Log, WritesOneEventALine) {
  ::testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "flip_done",
      {{"session", 42}, {"error", Status(Code::kAborted, "no luck")}});
  Log(LogLevel::kDebug, "hidden");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text,
              ::testing::HasSubstr("event=flip_done session=42 error=\"ABORTED: no luck\"\n"));
  EXPECT_THAT(text, ::testing::Not(::testing::HasSubstr("hidden")));
}

TEST(Log, UnknownLevelNamesTheKnownOnes) {
  EXPECT_THAT(ParseLogLevel("loud").status().message(),
              ::testing::HasSubstr("debug, info, warn, error"));
}

}  // namespace
}  // namespace tensorbus
