#include "tensorbus/cli/bench_stats.h"

#include <gtest/gtest.h>

namespace tensorbus::cli {
namespace {

TEST(BenchStats, SpreadOfTwentyIsByNearestRank) {
  std::vector<double> values;
  for (int i = 20; i > 0; --i) values.push_back(i);
  const Spread spread = SpreadOf(values);
  EXPECT_EQ(spread.min, 1);
  EXPECT_EQ(spread.median, 10.5);
  EXPECT_EQ(spread.p95, 19);
  EXPECT_EQ(spread.max, 20);
}

TEST(BenchStats, SpreadOfOneAndOfNone) {
  EXPECT_EQ(SpreadOf({3}).p95, 3);
  EXPECT_EQ(SpreadOf({3}).median, 3);
  EXPECT_EQ(SpreadOf({}).max, 0);
}

TEST(BenchStats, HostSaysWhatItIs) {
  const HostInfo host = DescribeHost();
  EXPECT_GT(host.cores, 0U);
  EXPECT_GT(host.ram_bytes, 1U << 20);
  EXPECT_GE(host.ram_bytes, host.ram_available_bytes);
}

}  // namespace
}  // namespace tensorbus::cli
