#include "tensorbus/transport/part_plan.h"

#include <gtest/gtest.h>

#include "tests/testing/random_blocks.h"

namespace tensorbus::transport {
namespace {

using testing::Pick;
using testing::Random;

StridedBlock Rows(std::uint64_t rows, std::uint64_t bytes, std::uint64_t pitch) {
  StridedBlock block;
  block.rank = 2;
  block.extents = {rows, bytes};
  block.strides = {pitch, 1};
  return block;
}

TEST(PartPlan, CoversEveryByteOnceInOrder) {
  Random random(51);
  for (int round = 0; round < 60; ++round) {
    RouteEnd end;
    const std::uint64_t blocks = Pick(random, 0, 800);
    for (std::uint64_t i = 0; i < blocks; ++i) {
      end.blocks.push_back(
          Rows(Pick(random, 0, 5), Pick(random, 0, round % 2 == 0 ? 9 : 900), 900));
    }
    const PartPlan plan(end, Pick(random, 1, 3000));
    std::vector<std::uint64_t> reached(end.blocks.size());
    for (std::size_t p = 0; p < plan.size(); ++p) {
      ASSERT_FALSE(plan.part(p).empty());
      ASSERT_LE(plan.part(p).size(), PartPlan::kItemsMax + 1);
      for (const PartPlan::Item& item : plan.part(p)) {
        ASSERT_EQ(item.range.first, reached[item.block]);
        ASSERT_GT(item.range.count, 0U);
        reached[item.block] += item.range.count;
      }
    }
    for (std::size_t i = 0; i < reached.size(); ++i) ASSERT_EQ(reached[i], end.blocks[i].bytes());
  }
}

TEST(PartPlan, CutsLargeBlocksOnRowEdges) {
  const PartPlan plan({.blocks = {Rows(10, 300, 400)}}, 1000);
  ASSERT_EQ(plan.size(), 4U);
  EXPECT_EQ(plan.part(0)[0].range.count, 900U);
  EXPECT_EQ(plan.part(3)[0].range.count, 300U);
}

TEST(PartPlan, PutsSmallBlocksTogether) {
  RouteEnd end;
  for (int i = 0; i < 10; ++i) end.blocks.push_back(Rows(1, 300, 300));
  EXPECT_EQ(PartPlan(end, 1000).size(), 4U);
}

}  // namespace
}  // namespace tensorbus::transport
