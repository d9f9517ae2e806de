#include "tensorbus/cli/table.h"

#include <gtest/gtest.h>
#include <sstream>

namespace tensorbus::cli {
namespace {

TEST(Table, AlignsTextLeftAndNumbersRight) {
  Table table({"NAME", "BYTES", "NOTE"}, {1});
  table.Add({"größer", "7", ""});
  table.Add({Paint("a", Colour::kRed, true), "1234567", "seen"});
  std::ostringstream out;
  table.Print(out, "> ");
  EXPECT_EQ(out.str(),
            "> NAME      BYTES  NOTE\n"
            "> größer        7\n"
            "> \x1b[31ma\x1b[0m       1234567  seen\n");
}

TEST(Table, PaintsOnlyWhereThereAreColours) {
  EXPECT_EQ(Paint("x", Colour::kGreen, false), "x");
  EXPECT_EQ(Paint("x", Colour::kPlain, true), "x");
  std::ostringstream file;
  EXPECT_FALSE(Colourful(file));
}

TEST(Table, CountsOneAndMany) {
  EXPECT_EQ(Count(1, "agent"), "1 agent");
  EXPECT_EQ(Count(0, "agent"), "0 agents");
  EXPECT_EQ(Count(12, "tensor"), "12 tensors");
}

}  // namespace
}  // namespace tensorbus::cli
