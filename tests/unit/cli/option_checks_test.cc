#include "tensorbus/cli/option_checks.h"

#include <gtest/gtest.h>

namespace tensorbus::cli {
namespace {

TEST(OptionChecks, VersionsAreWholeAndHaveASuccessor) {
  const CLI::Validator check = IsVersion(1);
  for (const char* good : {"1", "7", "18446744073709551614"}) EXPECT_EQ(check(good), "") << good;
  for (const char* bad : {"-1", "0", "18446744073709551615", "18446744073709551616", "1.5", "x"}) {
    EXPECT_NE(check(bad).find("is not a version"), std::string::npos) << bad;
  }
  EXPECT_EQ(IsVersion(0)("0"), "");
}

}  // namespace
}  // namespace tensorbus::cli
