#include "tensorbus/cli/table.h"

#include <gtest/gtest.h>
#include <sstream>

namespace tensorbus::cli {
namespace {

TEST(Table, AlignsTextLeftAndNumbersRight) {
  Table table({"NAME", "BYTES", "NOTE"}, {1});
  table.Add({"größer", "7", ""});
  table.Add({Cell("a", Colour::kRed), "1234567", "seen"});
  std::ostringstream out;
  table.Print(out, "> ");
  EXPECT_EQ(out.str(),
            "> NAME      BYTES  NOTE\n"
            "> größer        7\n"
            "> a       1234567  seen\n")
      << "no colours in what is no terminal";
}

TEST(Table, ShowsWhatATerminalWouldActOn) {
  Table table({"NAME", "NOTE"});
  table.Add({"a\x1b[2J\xc2\x9b", "1"});
  table.Add({"größer", "2"});
  std::ostringstream out;
  table.Print(out);
  EXPECT_EQ(out.str(),
            "NAME              NOTE\n"
            "a\\x1b[2J\\u{009b}  1\n"
            "größer            2\n");
}

TEST(Table, PaintsOnlyWhereThereAreColours) {
  EXPECT_EQ(Paint("x", Colour::kGreen, false), "x");
  EXPECT_EQ(Paint("x", Colour::kPlain, true), "x");
  EXPECT_EQ(Paint("x", Colour::kRed, true), "\x1b[31mx\x1b[0m");
  EXPECT_EQ(Paint("\x1b[1mx", Colour::kRed, true), "\x1b[31m\\x1b[1mx\x1b[0m");
  EXPECT_EQ(Paint("\x1b[1mx", Colour::kRed, false), "\\x1b[1mx");
  std::ostringstream file;
  EXPECT_FALSE(Colourful(file));
}

TEST(Table, TellsBytesInDecimalUnits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1'234'000'000), "1.234 GB");
}

TEST(Table, CountsOneAndMany) {
  EXPECT_EQ(Count(1, "agent"), "1 agent");
  EXPECT_EQ(Count(0, "agent"), "0 agents");
  EXPECT_EQ(Count(12, "tensor"), "12 tensors");
}

}  // namespace
}  // namespace tensorbus::cli
