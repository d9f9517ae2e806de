#include "tensorbus/base/stop_guard.h"

#include <gtest/gtest.h>

namespace tensorbus {
namespace {

using namespace std::chrono_literals;

TEST(StopGuard, LetsGoOfWhoStopsInTime) {
  StopGuard guard("agent", 1h);
  guard.At("copies");
}

TEST(StopGuardDeathTest, NamesTheStepThatDoesNotEnd) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        StopGuard guard("agent", 1s);  // time enough to come to the second step
        guard.At("workers");
        guard.At("copies");
        std::this_thread::sleep_for(10s);
      },
      ::testing::ExitedWithCode(1), "event=stop_does_not_end who=agent step=copies");
}

}  // namespace
}  // namespace tensorbus
