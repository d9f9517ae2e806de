#include "tensorbus/base/environment.h"

#include <array>
#include <cstdlib>
#include <gmock/gmock.h>

namespace tensorbus {
namespace {

using ::testing::ElementsAre;

TEST(WithEnvironment, StandsInForFlagsThatAreNotGiven) {
  ::setenv("TB_TEST_NAME", "from-environment", 1);
  ::setenv("TB_TEST_LEVEL", "from-environment", 1);
  ::setenv("TB_TEST_EMPTY", "", 1);
  ::unsetenv("TB_TEST_UNSET");
  const std::array argv = {"program", "--level", "given", "--name-prefix=x"};
  EXPECT_THAT(WithEnvironment(argv.size(), argv.data(),
                              {{"--name", "TB_TEST_NAME"},
                               {"--level", "TB_TEST_LEVEL"},
                               {"--empty", "TB_TEST_EMPTY"},
                               {"--unset", "TB_TEST_UNSET"}}),
              ElementsAre("--level", "given", "--name-prefix=x", "--name=from-environment"));
  const std::array assigned = {"program", "--name=given"};
  EXPECT_THAT(WithEnvironment(assigned.size(), assigned.data(), {{"--name", "TB_TEST_NAME"}}),
              ElementsAre("--name=given"));
}

}  // namespace
}  // namespace tensorbus
